import gzip
import json
from argparse import Namespace

import pytest
import torch

from slime.observability.profiling import PhaseTimer, utilization

pytestmark = pytest.mark.unit


def arguments(tmp_path, **changes):
    defaults = dict(
        device="cpu",
        run_dir=str(tmp_path),
        use_pytorch_profiler=True,
        profile_target=["train_actor"],
        profile_step_start=1,
        profile_step_end=2,
    )
    return Namespace(**{**defaults, **changes})


def run(timer):
    for timer.rollout_id in range(3):
        with timer("train"):
            with timer("log_probs"):
                torch.zeros(3).exp()
            with timer("actor_train"):
                torch.eye(3) @ torch.eye(3)


def test_the_target_of_the_chosen_rollouts_is_profiled(tmp_path):
    timer = PhaseTimer(arguments(tmp_path), rank=0)
    run(timer)
    assert set(timer.pop()) == {f"perf/{name}_time" for name in ("train", "log_probs", "actor_train")}
    (path,) = (tmp_path / "profile").iterdir()
    assert path.name == "train_actor-rollout-1.trace.json.gz"
    names = {event.get("name") for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]}
    assert "aten::mm" in names and "aten::exp" not in names


@pytest.mark.parametrize(("rank", "changes"), [(1, {}), (0, {"use_pytorch_profiler": False})])
def test_nothing_is_profiled_elsewhere(tmp_path, rank, changes):
    run(PhaseTimer(arguments(tmp_path, **changes), rank))
    assert not (tmp_path / "profile").exists()


def test_utilization_is_a_share_of_the_peak():
    metrics = {"perf/log_probs_tflops": 5.0, "perf/actor_train_tflops": 20.0, "perf/train_time": 9.0}
    assert utilization(metrics, 100.0) == {"perf/log_probs_mfu": 0.05, "perf/actor_train_mfu": 0.2}
    assert utilization(metrics, None) == {}
