"""PPO in whole runs: policy and critic take turns on the same devices; both are saved and resumed."""

import json

import pytest

from tests.system.runs import TrainRun

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]


def test_ppo_with_kl_in_the_reward_is_resumed(tmp_path, tiny_model_dir, local_ray):
    flags = ["--colocate", "--advantage-estimator", "ppo", "--critic-lr", 2e-3, "--num-critic-only-steps", 1]
    flags += ["--lambd", 0.95, "--ref-load", tiny_model_dir, "--kl-coef", 0.01, "--normalize-advantages"]
    flags += ["--actor-num-gpus-per-node", 2, "--deterministic-mode", "--save", tmp_path / "save"]
    run = TrainRun(tmp_path, tiny_model_dir, *flags, "--num-rollout", 2, ray=local_ray)
    assert run.finish() == 0, run.stderr
    only_critic, *both = run.metrics("train/step")
    assert not any(name in only_critic for name in ("train/loss", "train/pg_loss"))
    assert "train/pg_loss" in both[0] and both[0]["train/ppo_kl"] != 0  # the second of two steps has moved
    for step in (only_critic, *both):
        assert step["train/critic-value_loss"] > 0 and step["train/critic-grad_norm"] > 0
        assert step["train/critic-lr-pg_0"] == 2e-3
    first, second = run.metrics("rollout/step")
    assert first["rollout/values"] == 0 and second["rollout/values"] != 0  # an untrained critic predicts 0
    assert "rollout/kl" in second and "perf/critic_train_time" in second and "perf/critic_values_time" in second
    for path, steps in ((tmp_path / "save", 2), (tmp_path / "save" / "critic", 4)):
        meta = json.loads((path / "iter_0000002" / "meta.json").read_text())
        assert (meta["next_rollout_id"], meta["global_step"]) == (2, steps)

    # On one rank instead of two.
    flags += ["--actor-num-gpus-per-node", 1, "--num-rollout", 3, "--load", tmp_path / "save"]
    resumed = TrainRun(tmp_path, tiny_model_dir, *flags, run="resumed", ray=local_ray)
    assert resumed.finish() == 0, resumed.stderr
    (step,) = resumed.metrics("train/step")
    assert (step["train/step"], step["train/critic-step"]) == (4, 6)
    assert resumed.metrics("rollout/step")[0]["rollout/values"] != 0
    assert {path.stem for path in (run.path / "logs").iterdir()} >= {"train-0", "train-1", "critic-0", "critic-1"}


def test_adapters_beside_a_teacher(tmp_path, tiny_model_dir, local_ray):
    flags = ["--rollout-num-gpus", 1, "--lora-rank", 4, "--use-opd", "--opd-teacher-load", tiny_model_dir]
    flags += ["--check-weight-update-equal", "--save", tmp_path / "save", "--save-hf", tmp_path / "hf", "--lr", 1e-2]
    run = TrainRun(tmp_path, tiny_model_dir, *flags, ray=local_ray)
    assert run.finish() == 0, run.stderr
    steps = run.metrics("train/step")
    # The teacher is where the adapters start; engines have merged weights, which compute the same to rounding.
    assert abs(steps[0]["train/opd_reverse_kl"]) < 1e-6 < abs(steps[1]["train/opd_reverse_kl"])
    assert all(step["train/train_rollout_logprob_abs_diff"] < 1e-4 for step in steps)
    assert (tmp_path / "save" / "iter_0000002" / "adapter" / "adapter_model.safetensors").is_file()
    assert (tmp_path / "hf" / "model.safetensors").is_file()
