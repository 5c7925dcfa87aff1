"""The loop with every sequence spread over two trainer ranks."""

import pytest

from tests.system.runs import TrainRun

pytestmark = [pytest.mark.system, pytest.mark.timeout(420)]


def test_two_ranks_share_each_sequence(tmp_path, tiny_model_dir, local_ray):
    flags = ["--actor-num-gpus-per-node", 2, "--context-parallel-size", 2, "--colocate", "--max-tokens-per-gpu", 48]
    flags += ["--ref-load", tiny_model_dir, "--use-kl-loss", "--kl-loss-coef", 0.01, "--check-weight-update-equal"]
    flags += ["--save", tmp_path / "save", "--save-interval", 2]
    flags += ["--use-pytorch-profiler", "--profile-step-start", 1, "--profile-step-end", 2]
    run = TrainRun(tmp_path, tiny_model_dir, *flags, ray=local_ray)
    assert run.finish() == 0, run.stderr
    steps = run.metrics("train/step")
    assert [m["train/step"] for m in steps] == [2, 4]
    assert all(m["perf/ref_log_probs_tflops"] > 0 < m["perf/actor_train_tflops"] for m in run.metrics("rollout/step"))
    assert [p.name for p in (run.path / "profile").iterdir()] == ["train_overall-rollout-1.trace.json.gz"]
    assert max(m["train/train_rollout_logprob_abs_diff"] for m in steps) < 1e-5
    assert (tmp_path / "save" / "latest_checkpointed_iteration.txt").read_text() == "2\n"
