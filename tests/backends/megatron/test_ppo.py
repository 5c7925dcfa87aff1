"""PPO in a whole run on Megatron: policy and critic take turns on the same two ranks, and are resumed in another
layout."""

import json

import pytest

from tests.system.runs import TrainRun

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]


def test_ppo_is_resumed_in_another_layout(tmp_path, tiny_model_dir, local_ray):
    (tmp_path / "roles.yaml").write_text("critic:\n  adam-beta2: 0.95\n")
    flags = ["--train-backend", "megatron", "--dtype", "float32", "--colocate", "--actor-num-gpus-per-node", 2]
    flags += ["--advantage-estimator", "ppo", "--critic-lr", 2e-3, "--num-critic-only-steps", 1, "--lambd", 0.95]
    flags += ["--ref-load", tiny_model_dir, "--kl-coef", 0.01, "--megatron-config-path", tmp_path / "roles.yaml"]
    flags += ["--save", tmp_path / "save", "--num-rollout", 2, "--data-pad-size-multiplier", 4]
    layout = ["--tensor-model-parallel-size", 2, "--sequence-parallel"]
    run = TrainRun(tmp_path, tiny_model_dir, *flags, *layout, ray=local_ray)
    assert run.finish() == 0, run.stderr
    only_critic, *both = run.metrics("train/step")
    assert "train/pg_loss" not in only_critic and "train/pg_loss" in both[0]
    assert both[0]["train/ppo_kl"] != 0  # the second of two steps has moved
    assert all(step["train/critic-value_loss"] > 0 < step["train/critic-grad_norm"] for step in (only_critic, *both))
    first, second = run.metrics("rollout/step")
    assert first["rollout/values"] == 0 and second["rollout/values"] != 0  # an untrained critic predicts 0
    for path, steps in ((tmp_path / "save", 2), (tmp_path / "save" / "critic", 4)):
        meta = json.loads((path / "iter_0000001" / "meta.json").read_text())
        assert (meta["next_rollout_id"], meta["global_step"]) == (2, steps)

    layout = ["--pipeline-model-parallel-size", 2, "--num-rollout", 3, "--load", tmp_path / "save"]
    resumed = TrainRun(tmp_path, tiny_model_dir, *flags, *layout, run="resumed", ray=local_ray)
    assert resumed.finish() == 0, resumed.stderr
    (step,) = resumed.metrics("train/step")
    assert (step["train/step"], step["train/critic-step"]) == (4, 6)
    assert resumed.metrics("rollout/step")[0]["rollout/values"] != 0
