import math
import random
from argparse import Namespace
from itertools import combinations

import numpy as np
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


def test_dict_rewards_without_a_key_are_no_numbers():
    args = Namespace(**{**vars(ARGS), "log_passrate": True, "log_reward_category": "cat"})
    samples = [sample(0, {"a": 1, "cat": "x"}, 2), sample(0, {"a": 1}, 4), sample(0, None, 6)]
    metrics = rollout_metrics(args, samples, 1.0, 1)
    assert metrics["rollout/response_len/mean"] == 4 and metrics["rollout/error_cat/x"] == 1 / 3
    assert not any("zero_std" in name or "pass@" in name for name in metrics)


def test_pass_at_k_equals_the_count_over_all_subsets():
    rng = random.Random(0)
    prompts = [[rng.random() < 0.3 for _ in range(6)] for _ in range(20)]
    rates = pass_at_k([(len(p), sum(p)) for p in prompts])
    assert set(rates) == {"pass@1", "pass@2", "pass@4"}
    for k in (1, 2, 4):
        share = [sum(any(c) for c in combinations(p, k)) / math.comb(6, k) for p in prompts]
        assert rates[f"pass@{k}"] == pytest.approx(sum(share) / len(share), abs=1e-12)


def test_pass_at_k_equals_the_product_of_the_paper():
    def reference(n, c, k):
        """Chen et al. 2021, section 2.1: 1 - prod over i in (n - c, n] of (1 - k / i)."""
        return 1.0 if n - c < k else 1.0 - np.prod(1.0 - k / np.arange(n - c + 1, n + 1, dtype=np.float64))

    rng = random.Random(1)
    counts = [(n, rng.randint(0, n)) for n in (rng.randint(64, 200) for _ in range(50))]
    rates = pass_at_k(counts)
    assert list(rates) == [f"pass@{2**i}" for i in range(len(rates))] and len(rates) > 6
    for i, rate in enumerate(rates.values()):
        assert rate == pytest.approx(np.mean([reference(n, c, 2**i) for n, c in counts]), abs=1e-12)


def test_pieces_of_a_trajectory_count_once():
    args = Namespace(**{**vars(ARGS), "log_passrate": True})
    pieces = [sample(0, 1.0, 2, rollout_id=5) for _ in range(6)]
    metrics = rollout_metrics(args, [*pieces, sample(0, 0.0, 2, rollout_id=6)], 1.0, 1)
    assert metrics["passrate/pass@1"] == 0.5 and metrics["passrate/pass@2"] == 1.0
    assert "rollout/zero_std/count_1" not in metrics
    data = {"a": {"rewards": [1.0] * 6 + [0.0], "samples": [*pieces, sample(0, 0.0, 2, rollout_id=6)]}}
    assert eval_metrics(args, data)["eval/a-pass@1"] == 0.5


def test_engine_reports_become_metrics():
    def reply(completion, cached, **spec):
        return {"completion_tokens": completion, "prompt_tokens": 10, "cached_tokens": cached, **spec}

    old = {"spec_accept_token_num": 6, "spec_draft_token_num": 12, "spec_verify_ct": 4, "spec_accept_rate": 0.5}
    new = {"spec_num_correct_drafts": 3, "spec_num_proposed_drafts": 6, "spec_verify_ct": 2}
    new |= {"spec_accepted_drafts": 3, "spec_proposed_drafts": 6}  # the newest release has these no longer
    one, two = Sample(reward=1.0), Sample(reward=0.0)
    one.append_response_tokens(None, tokens=[1] * 10, meta_info=reply(10, 0, **old))
    one.append_response_tokens(None, tokens=[7] * 4, trainable=False)
    one.append_response_tokens(None, tokens=[1] * 5, meta_info=reply(5, 5, **new))
    two.append_response_tokens(None, tokens=[1] * 8, meta_info=reply(8, 10))
    metrics = rollout_metrics(ARGS, [one, two], 1.0, 1)
    assert metrics["rollout/spec_accept_rate"] == 9 / 18 and metrics["rollout/spec_accept_length"] == 15 / 6
    assert metrics["rollout/prefix_cache_hit_rate"] == 15 / 30
    assert metrics["rollout/prefix_cache_tokens_per_sample"] == 15 / 2
    assert not any("spec_" in name for name in rollout_metrics(ARGS, [two], 1.0, 1))


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


def test_optional_eval_metrics():
    args = Namespace(**{**vars(ARGS), "log_reward_category": "cat", "log_multi_turn": True})
    samples = [sample(0, {"score": 1, "cat": c}, 2, metadata={"round_number": n}) for c, n in (("ok", 1), ("bad", 3))]
    metrics = eval_metrics(args, {"a": {"rewards": [1, 1], "samples": samples}})
    assert metrics["eval/a/error_cat/bad"] == 0.5
    assert metrics["eval/a/multi_turn/multi_turn_metric/round_number_max"] == 3
    assert metrics["eval/a/multi_turn/raw_response_length/mean"] == 2


NAMES = """
response_len/mean response_len/median response_len/max response_len/min zero_std/count_1 repetition_frac
truncated_ratio error_cat/ok spec_accept_rate spec_accept_length prefix_cache_hit_rate
""".split()
PERF_NAMES = """
rollout_time tokens_per_gpu_per_sec longest_sample_tokens_per_sec effective_tokens_per_gpu_per_sec
longest_effective_sample_tokens_per_sec non_generation_time
""".split()
EVAL_NAMES = "eval/a eval/a-truncated_ratio eval/a-pass@1 eval/a-pass@2 eval/a/response_len/mean".split()


def test_all_names_that_users_rely_on():
    args = Namespace(
        reward_key="s", log_reward_category="cat", log_multi_turn=True, log_passrate=True, log_correct_samples=True
    )
    spec = {"accepted_tokens": 1, "draft_tokens": 2, "verify_steps": 1, "completion_tokens": 2}
    cache = {"prompt_tokens": 4, "cached_tokens": 1}
    more = {"spec_info": spec, "prefix_cache_info": cache, "metadata": {"round_number": 2}}
    samples = [sample(0, {"s": 1, "cat": "ok"}, 3, **more) for _ in range(2)]
    metrics = rollout_metrics(args, samples, 1.0, 1)
    wanted = [f"rollout/{name}" for name in NAMES] + [f"perf/{name}" for name in PERF_NAMES]
    wanted += ["passrate/pass@1", "passrate/pass@2", "multi_turn/wo_obs_response_length/mean"]
    wanted += [f"multi_turn/multi_turn_metric/round_number_{name}" for name in ("mean", "max", "min", "median")]
    assert [name for name in wanted if name not in metrics] == []
    result = {"a": {"rewards": [1, 1], "truncated": [False, False], "samples": samples}}
    assert [name for name in EVAL_NAMES if name not in eval_metrics(args, result)] == []
