import logging
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.training.flops import ModelFlops
from slime.training.schedule import build_dp_schedule
from slime.utils.seqlen_balancing import get_seqlen_balanced_partitions

pytestmark = pytest.mark.unit


@st.composite
def problems(draw):
    dp_size = draw(st.integers(1, 4))
    rollouts = draw(st.lists(st.integers(1, 3), min_size=dp_size, max_size=24))
    ids = [i for i, pieces in enumerate(rollouts) for _ in range(pieces)]
    ids = draw(st.permutations(ids)) if draw(st.booleans()) else ids
    lengths = draw(st.lists(st.integers(2, 120), min_size=len(ids), max_size=len(ids)))
    steps = draw(st.integers(1, max(len(rollouts) // dp_size, 1)))
    limit = draw(
        st.sampled_from([{"max_tokens": 64}, {"max_tokens": 150}, {"micro_batch_size": 1}, {"micro_batch_size": 3}])
    )
    options = {"dp_size": dp_size, "balance": draw(st.booleans())} | limit
    if draw(st.booleans()):
        options["num_steps"] = steps
    else:
        options["global_batch_size"] = max(len(rollouts) // steps, dp_size)
    if draw(st.booleans()):
        options["costs"] = [7 * n + n * n for n in lengths]
    if draw(st.booleans()):
        options["micro_batch_multiple"] = draw(st.integers(1, 4))
    return lengths, ids, options


def expected_steps(order: list[int], options: dict) -> list[list[int]]:
    if "global_batch_size" in options:
        size = options["global_batch_size"]
        return [order[start : start + size] for start in range(0, len(order), size)]
    parts = np.array_split(np.arange(len(order)), options["num_steps"])
    sizes = sorted(len(part) for part in parts)
    assert sizes[-1] - sizes[0] <= 1
    bounds = [len(order) * i // options["num_steps"] for i in range(options["num_steps"] + 1)]
    steps = [order[a:b] for a, b in pairwise(bounds)]
    assert sorted(map(len, steps)) == sizes, "as even as can be"
    return steps


@settings(max_examples=300, deadline=None)
@given(problems())
def test_invariants(problem):
    lengths, ids, options = problem
    steps = expected_steps(list(dict.fromkeys(ids)), options)
    if any(sum(ids.count(r) for r in step) < options["dp_size"] for step in steps):
        with pytest.raises(ValueError, match="fewer than"):
            build_dp_schedule(lengths, ids, **options)
        return
    schedule = build_dp_schedule(lengths, ids, **options)
    assert schedule == build_dp_schedule(lengths, ids, **options), "deterministic"

    micro_batches = [mb for step in schedule.steps for rank in step.micro_batches for mb in rank]
    assert sorted(i for mb in micro_batches for i in mb) == list(range(len(ids))), "each sample exactly once"
    multiple = options.get("micro_batch_multiple", 1)
    assert len(schedule.steps) == len(steps)
    for number, step in enumerate(schedule.steps):
        assert len(step.micro_batches) == options["dp_size"]
        (count,) = {len(rank) for rank in step.micro_batches}
        assert count % multiple == 0, "equal counts on all ranks, as pipelines need them"
        chosen = {ids[i] for rank in step.micro_batches for mb in rank for i in mb}
        assert chosen == set(steps[number]), "trajectories whole and in order"
        assert step.num_rollouts == len(chosen)
        assert all(any(rank) for rank in step.micro_batches), "every rank has work"
        bins = [mb for rank in step.micro_batches for mb in rank]
        if not all(bins):
            assert max(map(len, bins)) == 1, "empty only when every sample already is alone"
            assert bins.count([]) < options["dp_size"] * multiple
    for mb in micro_batches:
        if "max_tokens" in options:
            assert len(mb) <= 1 or sum(lengths[i] for i in mb) <= options["max_tokens"], "strict cap"
        else:
            assert len(mb) <= options["micro_batch_size"]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 500), min_size=1, max_size=60), st.integers(1, 8), st.booleans())
def test_partitions(lengths, k, equal_size):
    if len(lengths) < k or (equal_size and len(lengths) % k):
        with pytest.raises(ValueError):
            get_seqlen_balanced_partitions(lengths, k, equal_size)
        return
    parts = get_seqlen_balanced_partitions(lengths, k, equal_size)
    assert len(parts) == k and all(parts)
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    assert parts == sorted(parts) and all(part == sorted(part) for part in parts)
    if equal_size:
        assert {len(part) for part in parts} == {len(lengths) // k}
    totals = [sum(lengths[i] for i in part) for part in parts]
    assert max(totals) - min(totals) <= max(lengths)


def test_karmarkar_karp_known_case():
    """8, 7, 6, 5, 4 in two: differencing gives 16 | 14."""
    parts = get_seqlen_balanced_partitions([8, 7, 6, 5, 4], 2, equal_size=False)
    assert sorted(sum([8, 7, 6, 5, 4][i] for i in part) for part in parts) == [14, 16]


def test_overlong_sample_is_alone_and_named(caplog):
    with caplog.at_level(logging.WARNING):
        schedule = build_dp_schedule([10, 300, 20, 30], [5, 6, 7, 8], dp_size=1, global_batch_size=4, max_tokens=100)
    assert [1] in schedule.steps[0].micro_batches[0]
    assert "sample 1 (rollout_id 6) has 300 tokens" in caplog.text
    assert caplog.text.count("WARNING") == 1


def test_last_step_takes_what_is_left():
    schedule = build_dp_schedule([5] * 7, list(range(7)), dp_size=1, global_batch_size=3, micro_batch_size=2)
    assert [step.num_rollouts for step in schedule.steps] == [3, 3, 1]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"dp_size": 4}, "3 samples of 3 rollouts, fewer than the 4 data-parallel ranks"),
        ({"max_tokens": None}, "give max_tokens or micro_batch_size"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, not 0"),
        ({"rollout_ids": [1, 2]}, "3 total_lengths but 2 rollout_ids"),
        ({"costs": [1, 2]}, "3 total_lengths but 2 costs"),
        ({"num_steps": 1}, "give global_batch_size or num_steps, and not both"),
        ({"global_batch_size": None}, "give global_batch_size or num_steps"),
        ({"micro_batch_multiple": 0}, "micro_batch_multiple must be at least 1, not 0"),
    ],
)
def test_errors_name_sizes(changes, message):
    options = {"rollout_ids": [0, 1, 2], "dp_size": 1, "global_batch_size": 3, "max_tokens": 50, **changes}
    with pytest.raises(ValueError, match=message):
        build_dp_schedule([5, 6, 7], **options)


@pytest.mark.parametrize(
    "dp_size, cap, mean, sigma", [(8, 16384, 2000, 0.8), (2, 4096, 600, 1.0), (4, 20000, 8000, 0.5)]
)
def test_log_normal_lengths_stay_balanced(dp_size, cap, mean, sigma):
    """DP imbalance of token totals at most 2 %, and ranks that meet micro-batch by micro-batch wait little."""
    rank_imbalance, lockstep = [], []
    for seed in range(5):
        rng = np.random.default_rng(seed)
        lengths = np.clip(rng.lognormal(np.log(mean), sigma, 256), 16, cap).astype(int).tolist()
        step = build_dp_schedule(
            lengths, list(range(256)), dp_size=dp_size, global_batch_size=256, max_tokens=cap
        ).steps[0]
        tokens = np.array([[sum(lengths[i] for i in mb) for mb in rank] for rank in step.micro_batches])
        ideal = tokens.sum() / dp_size
        rank_imbalance.append(tokens.sum(1).max() / ideal - 1)
        lockstep.append(tokens.max(0).sum() / ideal - 1)
        assert tokens.shape[1] <= np.ceil(1.04 * ideal / cap + 1), "about as few micro-batches as the cap permits"
    assert max(rank_imbalance) <= 0.02
    assert np.mean(lockstep) <= 0.03


@pytest.mark.parametrize("balance", [True, False])
def test_one_micro_batch_per_rank_is_half_of_the_samples(balance):
    """Samples that need two micro-batches do not fill the first to the cap and leave the second half empty."""
    lengths = np.random.default_rng(0).integers(30, 170, 64).tolist()
    schedule = build_dp_schedule(
        lengths, list(range(64)), dp_size=2, global_batch_size=64, max_tokens=4096, balance=balance
    )
    tokens = [[sum(lengths[i] for i in mb) for mb in rank] for rank in schedule.steps[0].micro_batches]
    assert np.shape(tokens) == (2, 1)
    assert max(tokens)[0] <= 1.01 * sum(lengths) / 2


def test_balance_by_flops_evens_out_attention():
    """With lengths at which attention dominates, equal tokens are not equal work."""
    model = ModelFlops(per_token=10, per_token_pair=1)
    ratios = {}
    for name, costs in (("tokens", None), ("flops", model.forward)):
        worst = []
        for seed in range(5):
            lengths = np.clip(np.random.default_rng(seed).lognormal(7, 1.0, 128), 16, 8192).astype(int).tolist()
            schedule = build_dp_schedule(
                lengths,
                list(range(128)),
                dp_size=4,
                global_batch_size=128,
                max_tokens=16384,
                costs=None if costs is None else [costs(n) for n in lengths],
            )
            work = [sum(model.forward(lengths[i]) for mb in r for i in mb) for r in schedule.steps[0].micro_batches]
            worst.append(max(work) * 4 / sum(work) - 1)
        ratios[name] = max(worst)
    assert ratios["flops"] <= 0.02 < ratios["tokens"], ratios


def test_flops_of_a_model():
    config = {
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 3,
        "intermediate_size": 5,
        "vocab_size": 11,
    }
    layer = 8 * 12 + 2 * 8 * 6 + 12 * 8 + 3 * 8 * 5
    dense = ModelFlops.of_hf_config(config)
    assert dense.per_token == 2 * (2 * layer + 8 * 11)
    # Scores and values: 2 products x 2 FLOPs x 4 heads x 3, in 2 layers, for each of 1 + 2 + 3 pairs.
    assert dense.forward(3) == 3 * dense.per_token + 6 * 2 * 2 * 2 * 12
    sparse = ModelFlops.of_hf_config({"text_config": config, "num_experts_per_tok": 2, "moe_intermediate_size": 4})
    assert sparse.per_token == dense.per_token + 2 * 2 * (2 * 3 * 8 * 4 - 3 * 8 * 5)
    with pytest.raises(ValueError, match="no vocab_size"):
        ModelFlops.of_hf_config({**config, "vocab_size": None})
