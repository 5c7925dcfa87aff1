import pytest

from slime.engine.kv_cache import BlockManager, IntegrityError
from slime.engine.protocol import Request, SamplingParams
from slime.engine.sequence import Sequence

pytestmark = pytest.mark.unit


def sequence(ids: list[int]) -> Sequence:
    return Sequence(Request("r", ids, SamplingParams()), 0, frozenset(), lambda seq: None)


def compute(manager: BlockManager, seq: Sequence) -> None:
    """Do what the scheduler does for a whole prompt."""
    blocks = manager.match(seq, len(seq.token_ids) - 1)
    for block in blocks:
        manager.acquire(block)
    seq.blocks = blocks + manager.allocate(manager.blocks_for(len(seq.token_ids)) - len(blocks))
    seq.num_computed = len(seq.token_ids)
    manager.register(seq)


def test_blocks_are_shared_and_come_back():
    manager = BlockManager(10, 4)
    first, second = sequence(list(range(10))), sequence([*range(8), 77, 78])
    compute(manager, first)
    compute(manager, second)
    assert first.blocks[:2] == second.blocks[:2] and first.blocks[2] != second.blocks[2]
    assert manager.num_free == 10 - 4
    manager.check_integrity(idle=False)
    manager.release(first)
    assert manager.num_free == 10 - 3
    manager.release(second)
    manager.check_integrity()


def test_the_last_token_is_always_computed():
    manager = BlockManager(10, 4)
    seq = sequence(list(range(8)))
    compute(manager, seq)
    assert len(manager.match(sequence(list(range(8))), 7)) == 1


def test_released_content_is_found_until_it_is_overwritten_oldest_first():
    manager = BlockManager(4, 2)
    old, new = sequence([1, 2, 3, 4]), sequence([5, 6, 7, 8])
    compute(manager, old)
    compute(manager, new)
    manager.release(old)
    manager.release(new)
    assert len(manager.match(old, 4)) == 2
    manager.allocate(1)  # takes the end of the oldest
    assert len(manager.match(old, 4)) == 1
    assert len(manager.match(new, 4)) == 2


def test_a_new_weight_version_matches_nothing():
    manager = BlockManager(8, 2)
    seq = sequence([1, 2, 3, 4])
    compute(manager, seq)
    manager.release(seq)
    manager.set_version("1")
    assert manager.match(seq, 4) == []
    compute(manager, seq)
    manager.set_version("1")  # the same name, but the weights have changed again
    assert manager.match(sequence([1, 2, 3, 4]), 4) == []
    manager.check_integrity(idle=False)


def test_the_chain_covers_the_whole_prefix():
    manager = BlockManager(8, 2)
    seq = sequence([1, 2, 3, 4])
    compute(manager, seq)
    assert manager.match(sequence([9, 9, 3, 4]), 4) == []


def test_uncacheable_blocks_are_not_registered():
    manager = BlockManager(8, 2)
    seq = sequence([1, 2, 3, 4])
    seq.cacheable = False
    compute(manager, seq)
    assert not manager.block_of


def test_flush_forgets_content_in_use_and_free():
    manager = BlockManager(8, 2)
    seq = sequence([1, 2, 3, 4])
    compute(manager, seq)
    manager.flush()
    assert manager.match(sequence([1, 2, 3, 4]), 4) == []
    manager.release(seq)
    manager.check_integrity()


def test_integrity_errors():
    manager = BlockManager(4, 2)
    seq = sequence([1, 2, 3])
    compute(manager, seq)
    with pytest.raises(IntegrityError, match="2 blocks are held while idle"):
        manager.check_integrity()
    manager.refs[seq.blocks[0]] = 0
    with pytest.raises(IntegrityError, match="free list"):
        manager.check_integrity(idle=False)
    manager = BlockManager(4, 2)
    manager.hash_of[1] = b"x"
    with pytest.raises(IntegrityError, match="hash table"):
        manager.check_integrity()
