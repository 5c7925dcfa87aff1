from argparse import Namespace

import pytest
import torch

from slime.observability.memory_history import memory_history

pytestmark = pytest.mark.unit


def arguments(tmp_path, recorder, steps):
    return Namespace(
        record_memory_history=True,
        memory_recorder=recorder,
        memory_snapshot_dir=str(tmp_path),
        memory_snapshot_num_steps=steps,
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_snapshots_of_the_gpu(tmp_path):
    history = memory_history(arguments(tmp_path, "torch", 2), "actor-rank-3")
    for rollout_id in range(3):
        with history.watch(rollout_id):
            torch.zeros(1000, device="cuda")
    with pytest.raises(torch.OutOfMemoryError), history.watch(3):
        torch.zeros(1 << 50, device="cuda", dtype=torch.uint8)
    torch.cuda.memory._record_memory_history(enabled=None)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"memory-rollout-1-actor-rank-3.pickle", "memory-out-of-memory-rollout-3-actor-rank-3.pickle"}


def allocate_for_the_record():
    return bytearray(70 << 20)


def train():
    return allocate_for_the_record()


@pytest.mark.parametrize("steps", [None, 2])
def test_allocations_in_host_memory(tmp_path, steps):
    """The function that allocated most stands in the record, unless recording ended before."""
    memray = pytest.importorskip("memray")
    history = memory_history(arguments(tmp_path, "memray", steps), "actor-rank-3")
    for rollout_id in range(3):
        with history.watch(rollout_id):
            if rollout_id == 2:
                kept = train()
    history.close()
    assert len(kept) == 70 << 20
    with memray.FileReader(tmp_path / "memory-actor-rank-3.memray") as reader:
        records = list(reader.get_high_watermark_allocation_records())
        functions = {frame[0] for record in records for frame in record.stack_trace()}
    assert ("allocate_for_the_record" in functions) == (steps is None)


def test_nothing_is_recorded_unasked(tmp_path):
    args = Namespace(**{**vars(arguments(tmp_path, "memray", 1)), "record_memory_history": False})
    history = memory_history(args, "actor-rank-0")
    with history.watch(0):
        pass
    history.close()
    assert list(tmp_path.iterdir()) == []
