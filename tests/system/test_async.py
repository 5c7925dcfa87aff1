"""The asynchronous loop and the fully asynchronous rollout with all real parts."""

import json
import signal

import pytest

from tests.system.runs import TrainRun

pytestmark = [pytest.mark.system, pytest.mark.timeout(420)]
FULLY_ASYNC = ["--rollout-function-path", "slime.rollout.fully_async_rollout.generate_rollout"]
ASYNC = {"script": "train_async.py"}


def spans(run, rollouts):
    """Weight versions that the samples of each rollout come from."""
    return [{v for s in run.samples(f"rollout_{i:06d}") for v in s["weight_versions"]} for i in range(rollouts)]


def test_one_step_off_with_a_sync_every_two_rollouts(tmp_path, tiny_model_dir, local_ray):
    flags = ["--rollout-num-gpus", 1, "--num-rollout", 5, "--update-weights-interval", 2]
    flags += ["--save", tmp_path / "save", "--save-interval", 2]
    run = TrainRun(tmp_path, tiny_model_dir, *flags, **ASYNC, ray=local_ray)
    assert run.finish() == 0, run.stderr
    assert [line["sample_indices"] for line in run.trained()] == [list(range(16 * i, 16 * i + 16)) for i in range(5)]
    # Rollouts 1 and 2 were generated before the sync after rollout 1, so rollout 2 is one version old.
    assert spans(run, 5) == [{"1"}, {"1"}, {"1"}, {"2"}, {"2"}]
    assert [m["rollout/staleness/max"] for m in run.metrics("rollout/step")] == [0, 0, 1, 0, 1]

    # Saved after rollout 1, while rollout 2 was on its way: the resumed run makes that one again.
    (tmp_path / "save" / "latest_checkpointed_iteration.txt").write_text("2")
    flags += ["--load", tmp_path / "save"]
    resumed = TrainRun(tmp_path, tiny_model_dir, *flags, run="resumed", **ASYNC, ray=local_ray)
    assert resumed.finish() == 0, resumed.stderr
    lines = [line["sample_indices"] for line in resumed.trained()]
    assert lines == [list(range(16 * i, 16 * i + 16)) for i in range(2, 5)]


def test_fully_async_killed_and_resumed(tmp_path, tiny_model_dir):
    """Weights change in mid-request, ages stay within the bound, and a kill loses and repeats nothing."""
    save = tmp_path / "save"
    flags = ["--rollout-num-gpus", 1, "--num-rollout", 8, "--save", save, "--save-interval", 2, *FULLY_ASYNC]
    flags += ["--over-sampling-batch-size", 8, "--max-weight-staleness", 2, "--rollout-max-response-len", 200]
    flags += ["--max-tokens-per-gpu", 512]
    killed = TrainRun(tmp_path, tiny_model_dir, *flags, prompts=96)
    killed.wait_for(lambda: (save / "latest_checkpointed_iteration.txt").exists() and len(killed.trained()) >= 3)
    killed.process.send_signal(signal.SIGKILL)
    killed.process.communicate()
    assert killed.gone_within(30)
    before = killed.trained()
    resumed = TrainRun(tmp_path, tiny_model_dir, *flags, "--load", save, prompts=96)
    assert resumed.finish() == 0, resumed.stderr
    assert resumed.gone_within(0)
    after = resumed.trained()[len(before) :]
    kept = [line for line in before if line["rollout_id"] < after[0]["rollout_id"]]
    assert [line["rollout_id"] for line in kept + after] == list(range(8))
    trained = [index for line in kept + after for index in line["sample_indices"]]
    assert len(trained) == len(set(trained)) == 8 * 16
    metrics = resumed.metrics("rollout/step")
    assert max(m["rollout/staleness/max"] for m in metrics) <= 2
    assert any(m["rollout/staleness/stale_ratio"] > 0 for m in metrics)
    # What was generated but not trained on waits in the last checkpoint.
    from slime.utils import state_file

    state = state_file.load(str(save / "rollout" / "global_dataset_state_dict_7.pt"))
    waiting = [sample["index"] for group in state["buffer"] for sample in group]
    assert sorted(trained + waiting) == list(range(state["sample_index"]))
    tokens = [sample for group in state["buffer"] for sample in group if sample["response_length"]]
    assert all(len(s["rollout_log_probs"]) == s["response_length"] for s in tokens)
    assert json.loads((resumed.path / "metrics.jsonl").read_text().splitlines()[-1])


def test_colocate_is_refused_at_once(tmp_path, tiny_model_dir):
    run = TrainRun(tmp_path, tiny_model_dir, "--colocate", **ASYNC)
    assert run.finish(timeout=30) == 2
    assert "--colocate: the asynchronous loop generates while it trains" in run.stderr
