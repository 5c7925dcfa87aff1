"""Algorithms and corrections in a whole run: their flags, metrics and weights."""

import pytest

from tests.system.runs import TrainRun

pytestmark = [pytest.mark.system, pytest.mark.timeout(420)]


def test_corrections_on_reinforce_plus_plus_with_top_p_replay(tmp_path, tiny_model_dir, local_ray):
    flags = ["--colocate", "--num-rollout", 1, "--advantage-estimator", "reinforce++", "--normalize-advantages"]
    flags += ["--ref-load", tiny_model_dir, "--kl-coef", 0.01, "--use-opsm", "--use-tis"]
    flags += ["--custom-tis-function-path", "slime.training.mis:mis_function", "--mis-level", "geometric"]
    flags += ["--mis-mode", "mask", "--mis-veto-threshold", 1e-4]
    flags += ["--balance-by-flops", "--use-dynamic-global-batch-size"]
    flags += ["--rollout-top-p", 0.5, "--use-rollout-top-p-replay"]
    run = TrainRun(tmp_path, tiny_model_dir, *flags, ray=local_ray)
    assert run.finish() == 0, run.stderr
    (step,) = run.metrics("train/step")
    # Engine and trainer renormalise over the same tokens (without replay the trainer would see the whole
    # distribution) and agree to rounding, so every weight is 1 and nothing is dropped.
    assert step["train/train_rollout_logprob_abs_diff"] < 1e-5
    for name in ("mis_ratio", "mis_weight"):
        assert step[f"train/{name}"] == pytest.approx(1, abs=1e-4), name
    # The second optimizer step is off-policy.
    assert step["train/ois"] != 1 and step["train/ois"] == pytest.approx(1, abs=0.1)
    for name in ("mis_low_frac", "mis_high_frac", "mis_veto_frac"):
        assert step[f"train/{name}"] == 0, name
    assert 0 <= step["train/opsm_clipfrac"] < 1 and abs(step["train/mis_kl"]) < 1e-5
    (rollout,) = run.metrics("rollout/step")
    assert abs(rollout["rollout/advantages"]) < 1 and "rollout/kl" in rollout
    assert rollout["rollout/rollout_log_probs"] == pytest.approx(rollout["rollout/log_probs"], abs=1e-4)
