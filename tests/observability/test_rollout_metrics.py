import math
import random
from argparse import Namespace
from itertools import combinations

import pytest

from slime.observability.rollout_metrics import eval_metrics, has_repetition, pass_at_k, rollout_metrics
from slime.utils.types import Sample

pytestmark = pytest.mark.unit

ARGS = Namespace(
    reward_key=None, log_reward_category=None, log_multi_turn=False, log_passrate=False, log_correct_samples=False
)


def sample(group, reward, length, **fields):
    return Sample(group_index=group, reward=reward, response_length=length, tokens=[1] * (length + 2), **fields)


def test_rollout_metrics_by_hand():
    samples = [
        sample(0, 1.0, 4),
        sample(0, 1.0, 8, status=Sample.Status.TRUNCATED),
        sample(1, 0.0, 2),
        sample(1, 1.0, 6, loss_mask=[1, 0, 0, 0, 0, 1]),
    ]
    metrics = rollout_metrics(ARGS, samples, seconds=2.0, num_gpus=2)
    assert metrics["rollout/response_len/mean"] == 4.0  # the masked tokens of the last sample do not count
    assert metrics["rollout/response_len/median"] == 3.0
    assert metrics["rollout/response_len/max"] == 8.0
    assert metrics["rollout/response_len/min"] == 2.0
    assert metrics["rollout/truncated_ratio"] == 0.25
    assert metrics["rollout/zero_std/count_1"] == 1
    assert metrics["perf/tokens_per_gpu_per_sec"] == 20 / 2.0 / 2
    assert metrics["perf/effective_tokens_per_gpu_per_sec"] == 16 / 2.0 / 2
    assert metrics["perf/longest_sample_tokens_per_sec"] == 4.0


def test_optional_metrics():
    args = Namespace(
        reward_key="score",
        log_reward_category="cat",
        log_multi_turn=True,
        log_passrate=True,
        log_correct_samples=True,
    )
    samples = [
        sample(0, {"score": 1, "cat": "ok"}, 3, metadata={"round_number": 2}),
        sample(0, {"score": 0, "cat": "format"}, 5, metadata={"round_number": 4}),
    ]
    metrics = rollout_metrics(args, samples, 1.0, 1)
    assert metrics["rollout/error_cat/ok"] == metrics["rollout/error_cat/format"] == 0.5
    assert metrics["passrate/pass@1"] == 0.5 and metrics["passrate/pass@2"] == 1.0
    assert metrics["multi_turn/multi_turn_metric/round_number_mean"] == 3.0
    assert metrics["multi_turn/raw_response_length/mean"] == 4.0
    assert metrics["rollout/correct/count"] == 1 and metrics["rollout/correct/response_len/mean"] == 3.0


def test_pass_at_k_equals_the_count_over_all_subsets():
    rng = random.Random(0)
    prompts = [[rng.random() < 0.3 for _ in range(6)] for _ in range(20)]
    rates = pass_at_k([(len(p), sum(p)) for p in prompts])
    assert set(rates) == {"pass@1", "pass@2", "pass@4"}
    for k in (1, 2, 4):
        share = [sum(any(c) for c in combinations(p, k)) / math.comb(6, k) for p in prompts]
        assert rates[f"pass@{k}"] == pytest.approx(sum(share) / len(share), abs=1e-12)


def test_repetition():
    assert has_repetition("again and " * 500)
    assert not has_repetition("".join(random.Random(0).choices("abcdefghijklmnopqrstuvwxyz ", k=4000)))
    assert not has_repetition("")


def test_eval_metrics():
    args = Namespace(**{**vars(ARGS), "log_passrate": True})
    samples = [sample(0, 1.0, 2), sample(0, 0.0, 4), sample(1, 0.0, 6), sample(1, 0.0, 8)]
    data = {
        "held-out": {"rewards": [1.0, 0.0, 0.0, 0.0], "truncated": [False, True, False, False], "samples": samples}
    }
    metrics = eval_metrics(args, data)
    assert metrics["eval/held-out"] == metrics["eval/held-out-truncated_ratio"] == 0.25
    assert metrics["eval/held-out/response_len/mean"] == 5.0
    assert metrics["eval/held-out-pass@2"] == 0.5
