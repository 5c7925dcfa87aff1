"""--sglang-config with real servers: the policy is trained, a frozen model beside it judges and teaches."""

import pytest
import yaml

from tests.system.runs import TrainRun

pytestmark = [pytest.mark.system, pytest.mark.timeout(420)]


def test_a_frozen_model_beside_the_policy(tmp_path, tiny_model_dir, local_ray):
    models = [
        {"name": "judge", "update_weights": False, "server_groups": [{"num_gpus": 1}]},
        {
            "name": "actor",
            "server_groups": [{"num_gpus": 1, "overrides": {"max_running_requests": 8, "page_size": 4}}],
        },
    ]
    config = tmp_path / "engines.yaml"
    config.write_text(yaml.safe_dump({"sglang": models}))
    flags = ["--colocate", "--sglang-config", config, "--custom-rm-path", "tests.system.hooks.judged"]
    flags += ["--use-opd", "--opd-teacher-url", "judge", "--use-slime-router"]
    run = TrainRun(tmp_path, tiny_model_dir, *flags, ray=local_ray)
    assert run.finish() == 0, run.stderr
    steps, rollouts = run.metrics("train/step"), run.metrics("rollout/step")
    # The judge is the policy as it was before training: its log-probs part from the policy's with the first step.
    assert abs(steps[0]["train/opd_reverse_kl"]) < 1e-5 < abs(steps[-1]["train/opd_reverse_kl"])
    assert abs(rollouts[0]["rollout/raw_reward"] - rollouts[0]["rollout/rollout_log_probs"]) < 0.5
    logs = {path.name for path in (run.path / "logs").iterdir()}
    assert {"engine-0.log", "judge-0.log", "router.log", "router-judge.log"} <= logs
    assert len({v for s in run.samples("rollout_000001") for v in s["weight_versions"]}) == 1
