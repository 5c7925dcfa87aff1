"""The loop in which trainer and engine compute the same bits."""

import pytest

from tests.system.runs import TrainRun

pytestmark = [pytest.mark.system, pytest.mark.timeout(420)]


def test_log_probs_of_trainer_and_engine_are_equal(tmp_path, tiny_model_dir, local_ray):
    """Groups share prefixes in the engine's cache, prompts are cut into chunks, rows are packed, steps are several."""
    flags = ["--true-on-policy-mode", "--colocate", "--rollout-temperature", 0.8, "--gradient-checkpointing"]
    flags += ["--sglang-chunked-prefill-size", 5, "--sglang-page-size", 4, "--rollout-max-response-len", 40]
    flags += ["--num-rollout", 3]
    run = TrainRun(tmp_path, tiny_model_dir, *flags, ray=local_ray)
    assert run.finish() == 0, run.stderr
    steps = run.metrics("train/step")
    assert [m["train/train_rollout_logprob_abs_diff"] for m in steps] == [0.0] * 3
    assert all(m["train/grad_norm"] > 0 for m in steps)
