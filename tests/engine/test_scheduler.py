import random

import pytest

from slime.engine.kv_cache import BlockManager
from slime.engine.protocol import Request, SamplingParams
from slime.engine.rows import RowTable
from slime.engine.scheduler import Scheduler
from slime.engine.sequence import Sequence

pytestmark = pytest.mark.unit


def make(num_blocks=64, page=4, rows=8, chunk=32, max_blocks=32) -> Scheduler:
    return Scheduler(BlockManager(num_blocks, page), RowTable(rows, max_blocks), chunk)


def sequence(ids: list[int], new: int = 8, rid: str = "r") -> Sequence:
    return Sequence(Request(rid, ids, SamplingParams(max_new_tokens=new)), 0, frozenset(), lambda seq: None)


def step(scheduler: Scheduler, token: int = 1):
    """One step of an engine whose model always says `token`."""
    batch = scheduler.schedule()
    scheduler.computed(batch)
    done = [chunk.seq for chunk in batch.chunks if chunk.samples]
    finished = []
    for seq in batch.decode + done:
        seq.token_ids.append(token)
        scheduler.rows.length[seq.row] += 1
        scheduler.rows.last_token[seq.row] = token
        if len(seq.token_ids) >= seq.max_len:
            seq.finish({"type": "length"})
            finished.append(seq)
    scheduler.finish(finished)
    scheduler.start_decoding([seq for seq in done if seq.finish_reason is None])
    return batch


def test_a_long_prompt_is_cut_into_chunks_while_others_decode():
    scheduler = make(chunk=8)
    short, long = sequence([1, 2, 3]), sequence(list(range(20)))
    scheduler.add(short)
    step(scheduler)
    scheduler.add(long)
    spans = []
    while scheduler.prefilling or scheduler.waiting:
        batch = step(scheduler)
        assert batch.decode == [short]
        spans += [(chunk.start, chunk.end, chunk.samples) for chunk in batch.chunks]
    assert spans == [(0, 8, False), (8, 16, False), (16, 20, True)]
    assert set(scheduler.decoding) == {short, long}


def test_a_prompt_in_progress_is_waited_for_instead_of_computed_twice():
    scheduler = make()
    group = [sequence(list(range(10))) for _ in range(3)]
    other = sequence([90, 91])
    for seq in [*group, other]:
        scheduler.add(seq)
    first = step(scheduler)
    assert [chunk.seq for chunk in first.chunks] == [group[0], other]
    second = step(scheduler)
    assert [(c.seq, c.start, c.end) for c in second.chunks] == [(group[1], 8, 10), (group[2], 8, 10)]
    assert group[1].blocks[:2] == group[0].blocks[:2]


def test_out_of_blocks_the_latest_arrival_retracts_and_all_finish():
    scheduler = make(num_blocks=8, page=2, max_blocks=8)
    seqs = [sequence([10 * i, 10 * i + 1, 10 * i + 2], new=8) for i in range(4)]
    for seq in seqs:
        scheduler.add(seq)
    for _ in range(200):
        if not scheduler.has_work:
            break
        step(scheduler)
        scheduler.blocks.check_integrity(idle=False)
    assert not scheduler.has_work
    assert [seq.num_output for seq in seqs] == [8] * 4
    assert seqs[0].num_retractions == 0 and seqs[-1].num_retractions > 0
    scheduler.blocks.check_integrity()


def test_no_more_rows_than_capacity():
    scheduler = make(rows=2)
    for i in range(5):
        scheduler.add(sequence([i, i + 50]))
    step(scheduler)
    assert scheduler.num_running == 2 and len(scheduler.waiting) == 3


def test_decoding_is_ordered_by_length():
    scheduler = make()
    for length in (3, 9, 5):
        scheduler.add(sequence(list(range(length * 10, length * 11))))
    step(scheduler)
    lengths = [len(seq.token_ids) for seq in scheduler.decoding]
    assert lengths == sorted(lengths, reverse=True)
    assert scheduler.decoding_rows.tolist() == [seq.row for seq in scheduler.decoding]


def test_new_weights_make_running_kv_private_until_it_is_computed_again():
    scheduler = make()
    seq = sequence(list(range(10)), new=20)
    scheduler.add(seq)
    step(scheduler)
    scheduler.weights_changed("2")
    for _ in range(4):
        step(scheduler)
    twin = sequence(list(range(10)), new=1)
    assert scheduler.blocks.match(twin, 9) == []
    scheduler.retract([seq])
    step(scheduler)
    assert len(scheduler.blocks.match(twin, 9)) == 2


@pytest.mark.parametrize("seed", range(5))
def test_random_traffic_ends_clean(seed):
    rng = random.Random(seed)
    scheduler = make(num_blocks=20, page=2, rows=5, chunk=7, max_blocks=20)
    alive = []
    for _ in range(300):
        action = rng.random()
        if action < 0.3 and len(alive) < 12:
            seq = sequence([rng.randrange(3) for _ in range(rng.randint(1, 20))], new=rng.randint(1, 20))
            scheduler.add(seq)
            alive.append(seq)
        elif action < 0.35 and alive:
            victim = alive.pop(rng.randrange(len(alive)))
            if victim.finish_reason is None:
                victim.finish({"type": "abort"})
                scheduler.finish([victim])
        elif action < 0.4:
            scheduler.retract(scheduler.running)
        elif action < 0.43:
            scheduler.weights_changed(str(rng.random()))
        elif scheduler.has_work:
            step(scheduler)
        scheduler.blocks.check_integrity(idle=False)
        alive = [seq for seq in alive if seq.finish_reason is None]
    for _ in range(1000):
        if not scheduler.has_work:
            break
        step(scheduler)
    assert not scheduler.has_work
    scheduler.blocks.check_integrity()
    assert len(scheduler.rows.free) == 5


def decoding(scheduler: Scheduler, count: int) -> None:
    for i in range(count):
        scheduler.add(sequence([100 + i], new=100))
    while len(scheduler.decoding) < count:
        step(scheduler)


def test_few_newcomers_wait_for_company_but_not_for_long():
    scheduler = Scheduler(BlockManager(512, 4), RowTable(64, 32), 64, patience=5)
    decoding(scheduler, 40)
    late = sequence([1, 2, 3])
    scheduler.add(late)
    assert [len(step(scheduler).chunks) for _ in range(6)] == [0, 0, 0, 0, 0, 1]
    for i in range(3):
        scheduler.add(sequence([200 + i]))
    assert len(step(scheduler).chunks) == 3  # enough of them: at once


def test_a_newcomer_beside_few_others_does_not_wait():
    scheduler = Scheduler(BlockManager(512, 4), RowTable(64, 32), 64, patience=5)
    decoding(scheduler, 10)
    scheduler.add(sequence([1, 2, 3]))
    assert len(step(scheduler).chunks) == 1


def test_those_who_wait_for_a_prompt_in_the_cache_do_not_wait_longer():
    scheduler = Scheduler(BlockManager(512, 4), RowTable(128, 32), 64, patience=5)
    decoding(scheduler, 80)
    for _ in range(3):
        scheduler.add(sequence(list(range(10))))
    counts = [len(step(scheduler).chunks) for _ in range(7)]
    assert counts == [0, 0, 0, 0, 0, 1, 2]
