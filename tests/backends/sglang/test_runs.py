"""Whole runs on stock SGLang, on CPU: several models, servers that share a request, adapters.

Each needs packages of its own beside SGLang: sglang-router (SLIME_TEST_SGLANG_ROUTER_ENV names its environment) and
mooncake, peft.
"""

import importlib.util
import os

import pytest
import yaml

from slime.backends.sglang_utils.compat import installed_version
from tests.system.runs import TrainRun

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(900),
    pytest.mark.skipif(installed_version() is None, reason="SGLang is not installed"),
]
SGLANG = ("--rollout-engine", "sglang", "--sglang-max-total-tokens", 4096, "--sglang-max-running-requests", 8)
ROUTER_ENV = os.environ.get("SLIME_TEST_SGLANG_ROUTER_ENV")


def check(run: TrainRun) -> None:
    assert run.finish(timeout=800) == 0, run.stderr
    assert run.gone_within(5)
    steps = run.metrics("train/step")
    assert max(step["train/train_rollout_logprob_abs_diff"] for step in steps) < 1e-4
    versions = [{v for s in run.samples(f"rollout_{i:06d}") for v in s["weight_versions"]} for i in range(2)]
    assert versions == [{"1"}, {"2"}]


@pytest.mark.skipif(
    ROUTER_ENV is None or importlib.util.find_spec("mooncake") is None, reason="needs sglang-router and mooncake"
)
def test_prefill_and_decode_by_different_servers(tmp_path, tiny_model_dir, monkeypatch):
    monkeypatch.setenv("MC_FORCE_TCP", "1")  # mooncake's own: there is no RDMA here
    flags = ["--rollout-num-gpus", 2, "--prefill-num-servers", 1, "--sglang-router-env", ROUTER_ENV]
    run = TrainRun(tmp_path, tiny_model_dir, *SGLANG, *flags)
    check(run)
    assert "'disaggregation_mode': 'prefill'" in (run.path / "logs" / "engine-0.log").read_text()
    assert "'disaggregation_mode': 'decode'" in (run.path / "logs" / "engine-1.log").read_text()


def test_a_frozen_model_beside_the_policy(tmp_path, tiny_model_dir):
    models = [
        {"name": "judge", "update_weights": False, "server_groups": [{"num_gpus": 1}]},
        {"name": "actor", "server_groups": [{"num_gpus": 1, "overrides": {"schedule_policy": "fcfs"}}]},
    ]
    config = tmp_path / "engines.yaml"
    config.write_text(yaml.safe_dump({"sglang": models}))
    flags = ["--sglang-config", config, "--custom-rm-path", "tests.system.hooks.judged", "--use-slime-router"]
    run = TrainRun(tmp_path, tiny_model_dir, *SGLANG, *flags, "--use-opd", "--opd-teacher-url", "judge")
    check(run)
    steps = run.metrics("train/step")
    assert abs(steps[0]["train/opd_reverse_kl"]) < 1e-4 < abs(steps[-1]["train/opd_reverse_kl"])


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs peft")
def test_an_adapter_beside_its_base(tmp_path, tiny_model_dir):
    flags = ["--lora-rank", 4, "--lora-sync", "adapter", "--sglang-lora-backend", "torch_native", "--lr", 1e-2]
    flags += ["--rollout-num-gpus", 1, "--use-kl-loss", "--kl-loss-coef", 0.1, "--kl-loss-type", "k3"]
    run = TrainRun(tmp_path, tiny_model_dir, *SGLANG, *flags, "--ref-load", tiny_model_dir)
    check(run)
    assert run.metrics("train/step")[-1]["train/kl_loss"] > 1e-5  # the adapter says other things than its base
