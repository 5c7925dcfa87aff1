"""A whole run on stock SGLang."""

import pytest

from slime.backends.sglang_utils.compat import installed_version, parse_version
from tests.system.runs import TrainRun

VERSION = parse_version(installed_version() or "0")
pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(600),
    pytest.mark.skipif(VERSION == (0,), reason="SGLang is not installed"),
    pytest.mark.skipif(VERSION == (0, 5, 17), reason="this release returns routing from memory pinned by CUDA only"),
]


def test_what_the_engine_chose_is_replayed(tmp_path, moe_dir, local_ray):
    """Experts and sampling masks come from SGLang: the trainer's log-probs, taken with them, equal the engine's."""
    flags = ["--rollout-engine", "sglang", "--colocate", "--num-rollout", 2, "--sglang-max-total-tokens", 4096]
    flags += ["--use-rollout-routing-replay", "--use-rollout-top-p-replay", "--rollout-top-p", 0.5]
    flags += ["--rollout-top-k", 20, "--use-tis"]
    run = TrainRun(tmp_path, moe_dir, *flags, ray=local_ray)
    assert run.finish(timeout=500) == 0, run.stderr
    steps = run.metrics("train/step")
    assert len(steps) == 2 and steps[0]["train/grad_norm"] > 0
    for step in steps:
        assert step["train/train_rollout_logprob_abs_diff"] < 1e-5
        assert step["train/tis"] == pytest.approx(1, abs=1e-4)
