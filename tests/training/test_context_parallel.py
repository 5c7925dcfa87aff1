import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.training.context_parallel import (
    ContextParallel,
    all_gather_with_cp,
    chunk_length,
    local_row,
    local_spans,
    logit_spans,
    response_spans,
    slice_log_prob_with_cp,
)
from tests.processes import run_ranks
from tests.training.batches import random_batch, random_tokens, rank_data

pytestmark = pytest.mark.unit
SIZES = (1, 2, 4)


def micro_batch(seed=3, **options):
    batch = random_batch(seed)
    (data,) = rank_data(batch, {"advantages": random_tokens(1, batch)}, **options)
    return data.micro_batch(0, 0)


def test_known_layout():
    """12 tokens on 2 ranks: chunks of 3; rank 0 has chunks 0 and 3, rank 1 chunks 1 and 2."""
    assert local_spans(12, ContextParallel(0, 2)) == ((0, 3), (9, 12))
    assert local_spans(12, ContextParallel(1, 2)) == ((3, 6), (6, 9))
    # prompt 4, response 8: logits at [3, 11)
    assert logit_spans(12, 8, ContextParallel(0, 2)) == ((0, 0), (9, 11))
    assert response_spans(12, 8, ContextParallel(0, 2)) == ((0, 0), (6, 8))
    assert response_spans(12, 8, ContextParallel(1, 2)) == ((0, 3), (3, 6))


def test_short_sequence_leaves_the_last_chunk_empty():
    """5 tokens on 2 ranks: chunks of 2, the last one is padding only, and rank 0 does not own the last token."""
    assert chunk_length(5, 2) == 2
    assert logit_spans(5, 3, ContextParallel(0, 2)) == ((1, 2), (0, 0))
    assert logit_spans(5, 3, ContextParallel(1, 2)) == ((2, 4), (0, 0))


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 40), st.integers(0, 39), st.sampled_from([1, 2, 3, 4, 8]))
def test_every_response_token_has_one_owner(total, response, size):
    response = min(response, total - 1)
    values = torch.arange(response)
    owned = []
    for rank in range(size):
        cp = ContextParallel(rank, size)
        part = slice_log_prob_with_cp(values, total, response, cp)
        owned += part.tolist()
        positions = [p for span in logit_spans(total, response, cp) for p in range(*span)]
        assert [p - (total - response - 1) for p in positions] == part.tolist()
        held = [p for span in local_spans(total, cp) for p in range(*span)]
        assert set(positions) <= set(held)
        if size > 1:
            assert len(held) == 2 * chunk_length(total, size)
    assert sorted(owned) == values.tolist()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("options", [{}, {"micro_batch_size": 1}])
def test_rows_of_all_ranks_make_up_the_micro_batch(size, options):
    mb = micro_batch(**options)
    rows = [local_row(mb, ContextParallel(rank, size)) for rank in range(size)]
    assert len({tuple(row.lengths) for row in rows}) == 1
    padded = [length * size for length in rows[0].lengths]
    assert rows[0].cu_seqlens.tolist() == [sum(padded[:i]) for i in range(len(padded) + 1)]
    seen = {}
    start = 0
    for sequence, total in enumerate(mb.total_lengths):
        at = sum(rows[0].lengths[:sequence])
        for row in rows:
            local = slice(at, at + row.lengths[sequence])
            for position, token in zip(row.position_ids[local].tolist(), row.tokens[local].tolist(), strict=True):
                assert (sequence, position) not in seen
                seen[sequence, position] = token
        for position in range(padded[sequence]):
            real = position < total
            assert seen[sequence, position] == (mb.tokens[start + position].item() if real else 0)
        start += total
    response = torch.cat([row.response for row in rows])
    assert sorted(response.tolist()) == list(range(mb.loss_masks.shape[0]))
    targets = mb.response_token_indices
    for row in rows:
        assert torch.equal(row.labels, mb.tokens[targets[row.response]])
        assert torch.equal(row.position_ids[row.rows] + 1, mb.position_ids[targets[row.response]])
        assert torch.equal(row.slice(mb.advantages), mb.advantages[row.response])


def test_alone_nothing_changes():
    mb = micro_batch()
    row = local_row(mb)
    assert torch.equal(row.tokens, mb.tokens) and torch.equal(row.position_ids, mb.position_ids)
    assert torch.equal(row.cu_seqlens, mb.cu_seqlens) and row.lengths == mb.sequence_lengths
    assert torch.equal(row.rows, mb.response_token_indices - 1)
    assert row.gather(mb.advantages) is mb.advantages
    assert torch.equal(all_gather_with_cp(mb.advantages[:4], 9, 4), mb.advantages[:4])


def test_micro_batch_without_samples():
    ranks = rank_data(random_batch(3, samples=4), dp_size=3, micro_batch_size=1)
    (data,) = (rank for rank in ranks[1:] if [] in rank.steps[0])
    mb = data.micro_batch(0, data.steps[0].index([]))
    for size in SIZES:
        row = local_row(mb, ContextParallel(size - 1, size))
        assert row.tokens.tolist() == [0] * len(row.position_ids) and len(row.rows) == row.num_response_tokens == 0
        assert row.lengths == ([1] if size == 1 else [2])


def test_wrong_parts_are_refused():
    with pytest.raises(ValueError, match="3 values for 4 response tokens"):
        slice_log_prob_with_cp(torch.zeros(3), 9, 4, ContextParallel(0, 2))
    with pytest.raises(ValueError, match="rank 1 of 2 has 9 values of a sample with 8 response tokens"):
        all_gather_with_cp(torch.zeros(9), 12, 8, ContextParallel(1, 2))


def gather_worker(rank, path):
    dist.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=4)
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for group in (dist.group.WORLD, pairs[rank // 2]):
        cp = ContextParallel.of(group)
        mb = micro_batch()
        row = local_row(mb, cp)
        part = row.slice(mb.advantages).clone().requires_grad_()
        whole = row.gather(part)
        assert torch.equal(whole, mb.advantages)
        whole.square().sum().backward()
        assert torch.equal(part.grad, 2 * row.slice(mb.advantages))
        for values, total, response in zip(
            mb.split(mb.advantages), mb.total_lengths, mb.response_lengths, strict=True
        ):
            piece = slice_log_prob_with_cp(values, total, response, cp)
            assert torch.equal(all_gather_with_cp(piece, total, response, cp), values)
    dist.destroy_process_group()


@pytest.mark.integration
def test_gather_over_processes(tmp_path):
    run_ranks(gather_worker, 4, str(tmp_path))
