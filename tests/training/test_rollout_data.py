import pickle
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
import torch

from slime.modeling.attention import PackedSequences
from slime.training.context_parallel import ContextParallel, local_row
from slime.training.rollout_data import RankData, partition_rollout_data
from slime.training.schedule import build_dp_schedule
from tests.training.batches import random_batch, rank_data

pytestmark = pytest.mark.unit


def parts_of(batch, **changes):
    options = {"dp_size": 2, "global_batch_size": 4, "max_tokens": 30, **changes}
    plan = build_dp_schedule(batch["total_lengths"], batch["rollout_ids"], **options)
    return plan, partition_rollout_data(batch, plan)


def test_every_sample_reaches_one_micro_batch_unchanged():
    batch = random_batch(3, samples=13)
    plan, parts = parts_of(batch)
    seen = {}
    for rank, part in enumerate(parts):
        data = RankData(pickle.loads(pickle.dumps(part)))
        assert data.num_samples == len(data["tokens"])
        for s, step in enumerate(data.steps):
            assert len(step) == len(plan.steps[s].micro_batches[rank])
            for i in range(len(step)):
                mb = data.micro_batch(s, i)
                assert mb.num_rollouts == plan.steps[s].num_rollouts
                for position, response, mask, rollout_log_probs, tokens, metadata, reward in zip(
                    mb.sample_indices,
                    mb.response_lengths,
                    mb.split(mb.loss_masks),
                    mb.split(mb.rollout_log_probs),
                    torch.split(mb.tokens, mb.total_lengths),
                    mb.extra["metadata"],
                    mb.extra["rewards"],
                    strict=True,
                ):
                    index = position - 100
                    assert tokens.tolist() == batch["tokens"][index]
                    assert response == batch["response_lengths"][index] and mask.tolist() == batch["loss_masks"][index]
                    want = torch.tensor(batch["rollout_log_probs"][index], dtype=torch.float32)
                    assert rollout_log_probs.dtype == torch.float32 and torch.equal(rollout_log_probs, want)
                    assert metadata == batch["metadata"][index] and reward == batch["rewards"][index]
                    seen[index] = seen.get(index, 0) + 1
    assert seen == dict.fromkeys(range(13), 1)


def test_row_layout():
    (data,) = rank_data(random_batch(3))
    mb = data.micro_batch(0, 0)
    assert mb.tokens.dtype == torch.int64 and mb.loss_masks.dtype == torch.float32
    assert mb.cu_seqlens.tolist() == [0, *np.cumsum(mb.total_lengths).tolist()] and mb.cu_seqlens.dtype == torch.int32
    assert mb.max_seqlen == max(mb.total_lengths) and mb.sequence_lengths == mb.total_lengths
    ends = np.cumsum(mb.total_lengths)
    want = [i for end, n in zip(ends, mb.response_lengths, strict=True) for i in range(end - n, end)]
    assert mb.response_token_indices.tolist() == want
    assert mb.position_ids.tolist() == [i for n in mb.total_lengths for i in range(n)]


def test_empty_micro_batch_is_a_dummy_row():
    batch = {key: values[3:6] for key, values in random_batch(3, fan_out=False).items()}
    _, parts = parts_of(batch, max_tokens=1)
    data = next(d for d in map(RankData, parts) if [] in d.steps[0])
    data["advantages"] = [torch.zeros(n) for n in data["response_lengths"]]
    mb = data.micro_batch(0, data.steps[0].index([]))
    assert mb.tokens.tolist() == [0] and mb.cu_seqlens.tolist() == [0, 1] and mb.sequence_lengths == [1]
    assert PackedSequences(mb.sequence_lengths).max_seqlen == mb.max_seqlen == 1
    assert mb.response_token_indices.numel() == mb.loss_masks.numel() == mb.advantages.numel() == 0
    assert mb.to_rollout_batch()["advantages"] == [] and mb.num_rollouts == 3


def test_tokens_that_sampling_kept_travel_with_their_response_tokens():
    batch = random_batch(3)
    counts = [[(i + t) % 3 for t in range(n)] for i, n in enumerate(batch["response_lengths"])]
    batch["rollout_top_p_token_ids"] = [[1000 * i + k for k in range(sum(c))] for i, c in enumerate(counts)]
    batch["rollout_top_p_token_offsets"] = [[sum(c[:t]) for t in range(len(c) + 1)] for c in counts]
    seen = 0
    for data in rank_data(batch, dp_size=2, micro_batch_size=2):
        for index in range(len(data.steps[0])):
            mb = data.micro_batch(0, index)
            rows = [local_row(mb, ContextParallel(rank, 2)) for rank in range(2)]
            bounds = mb.kept.offsets.tolist()
            sets = [mb.kept.ids[a:b].tolist() for a, b in pairwise(bounds)]
            want = []
            for sample in (i - 100 for i in mb.sample_indices):
                starts = batch["rollout_top_p_token_offsets"][sample]
                want += [batch["rollout_top_p_token_ids"][sample][a:b] for a, b in pairwise(starts)]
            assert sets == want
            seen += len(sets)
            for row in rows:
                part = [row.kept.ids[a:b].tolist() for a, b in pairwise(row.kept.offsets.tolist())]
                assert part == [sets[i] for i in row.response.tolist()]
    assert seen == sum(batch["response_lengths"])
    batch["rollout_top_p_token_offsets"][4].pop()
    with pytest.raises(ValueError, match="sample 4: rollout_top_p_token_offsets must be"):
        rank_data(batch)


def test_denominators_and_token_counts():
    batch = random_batch(5)
    plan, parts = parts_of(batch, global_batch_size=4)
    for step_index, step in enumerate(plan.steps):
        positions = [i for rank in step.micro_batches for mb in rank for i in mb]
        want = sum(max(sum(batch["loss_masks"][i]), 1) for i in positions)
        assert all(part["num_tokens"][step_index] == want for part in parts)
    for part in parts:
        for index, denominator in zip(part["sample_indices"], part["denominators"], strict=True):
            mates = [i for i, r in enumerate(batch["rollout_ids"]) if r == batch["rollout_ids"][index - 100]]
            assert denominator == max(sum(sum(batch["loss_masks"][i]) for i in mates), 1)


def test_dtypes_and_optional_columns():
    batch = random_batch(3)
    batch["experts"] = [np.full((n - 1, 2, 3), i, dtype=np.int16) for i, n in enumerate(batch["total_lengths"])]
    batch["teacher_log_probs"] = [None] * 9
    (data,) = rank_data(batch)
    assert data["experts"][4].dtype == torch.int16 and data["experts"][4].shape[1:] == (2, 3)
    assert "teacher_log_probs" not in data and data.get("teacher_log_probs") is None
    data["returns"] = [torch.zeros(n, dtype=torch.float64) for n in data["response_lengths"]]
    assert data.micro_batch(0, 0).returns.dtype == torch.float64


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda b: b["loss_masks"][1].append(1), "sample 1: .* loss_masks, but response_length"),
        (
            lambda b: b["loss_masks"].__setitem__(1, [2] * b["response_lengths"][1]),
            "sample 1: loss_mask values must be 0 or 1",
        ),
        (lambda b: b["tokens"][3].append(1), "sample 3: .* tokens, but total_length"),
        (lambda b: b["rollout_log_probs"].__setitem__(4, None), r"'rollout_log_probs' is None for samples \[4\]"),
        (lambda b: b["rewards"].pop(), "'rewards' has 8 entries for 9 samples"),
        (lambda b: b["response_lengths"].__setitem__(5, b["total_lengths"][5]), "sample 5: response_length"),
    ],
)
def test_contradictions_name_the_sample(change, message):
    batch = random_batch(3)
    change(batch)
    with pytest.raises(ValueError, match=message):
        parts_of(batch)


def test_wrong_column_is_refused():
    (data,) = rank_data(random_batch(3))
    with pytest.raises(ValueError, match="'values' has 1 entries for 9 samples"):
        data["values"] = [torch.zeros(3)]
    with pytest.raises(ValueError, match="'values' of sample 0"):
        data["values"] = [torch.zeros(99)] * 9
    with pytest.raises(KeyError, match="has no 'nope'; it has"):
        data["nope"]


def test_a_hook_sees_a_dict():
    (data,) = rank_data(random_batch(3))
    assert set(data) == set(data.keys()) == {key for key, _ in data.items()} and len(data) == len(list(data.values()))
    assert "tokens" in data and "values" not in data and data.get("values") is None
    data["rewards"] = [1.0] * data.num_samples
    data.update(returns=[torch.ones(n) for n in data["response_lengths"]])
    assert data.micro_batch(0, 0).returns.unique().tolist() == [1.0]
    assert data.pop("rewards") == [1.0] * data.num_samples and "rewards" not in data
    with pytest.raises(ValueError, match="'rewards' has 1 entries"):
        data["rewards"] = [1.0]


def test_manager_side_needs_no_torch():
    code = (
        "import sys, slime.training.schedule, slime.training.rollout_data, slime.training.rewards; "
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
