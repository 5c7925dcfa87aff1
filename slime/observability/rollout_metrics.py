"""Metrics of a rollout or an evaluation, computed from its samples: names under `rollout/`, `eval/`, `perf/`."""

from __future__ import annotations

import math
import zlib
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from slime.utils.types import Sample

REPETITION_WINDOW = 10_000
REPETITION_RATIO = 10.0


def describe(prefix: str, values: Sequence[float]) -> dict[str, float]:
    """`{prefix}/mean`, `/median`, `/max`, `/min`; nothing for no values."""
    if len(values) == 0:
        return {}
    array = np.asarray(values, dtype=np.float64)
    stats = {"mean": array.mean(), "median": np.median(array), "max": array.max(), "min": array.min()}
    return {f"{prefix}/{name}": float(value) for name, value in stats.items()}


def mean(values: Iterable[float]) -> float:
    values = list(values)
    return float(np.mean(values)) if values else 0.0


def group_by_prompt(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Samples of one prompt together, in order of first appearance. Samples without a group stand alone."""
    groups: dict[Any, list[Sample]] = defaultdict(list)
    for position, sample in enumerate(samples):
        groups[("alone", position) if sample.group_index is None else sample.group_index].append(sample)
    return list(groups.values())


def has_repetition(text: str) -> bool:
    """The end of the text compresses more than tenfold: the model repeats itself."""
    window = text[-REPETITION_WINDOW:].encode()
    return len(window) > 0 and len(window) / len(zlib.compress(window)) > REPETITION_RATIO


def trajectory_rewards(samples: Sequence[Sample], rewards: Sequence[float]) -> list[float]:
    """One reward per trajectory: the pieces that one trajectory was split into (same `rollout_id`) count once."""
    pieces: dict[Any, list[float]] = defaultdict(list)
    for position, (sample, reward) in enumerate(zip(samples, rewards, strict=True)):
        pieces[("alone", position) if sample.rollout_id is None else sample.rollout_id].append(reward)
    return [sum(values) / len(values) for values in pieces.values()]


def rewards_by_prompt(args: Namespace, samples: Sequence[Sample]) -> list[list[float]]:
    """The rewards of each prompt's trajectories."""
    return [trajectory_rewards(g, [s.get_reward_value(args) for s in g]) for g in group_by_prompt(samples)]


def zero_std_counts(args: Namespace, samples: Sequence[Sample]) -> dict[str, int]:
    """Groups whose trajectories all have the same reward, counted per reward: they carry no GRPO signal."""
    counts: dict[str, int] = defaultdict(int)
    for rewards in rewards_by_prompt(args, samples):
        if len(rewards) > 1 and len(set(rewards)) == 1:
            counts[f"zero_std/count_{round(rewards[0], 1):g}"] += 1
    return dict(counts)


def pass_at_k(correct: Sequence[tuple[int, int]]) -> dict[str, float]:
    """Unbiased pass@k for k = 1, 2, 4, ... up to the smallest group (Chen et al. 2021, eq. 1).

    `correct` holds `(samples, correct samples)` per prompt: pass@k = mean of 1 - C(n - c, k) / C(n, k).
    """
    if not correct:
        return {}
    smallest = min(n for n, _ in correct)
    powers = [2**i for i in range(smallest.bit_length()) if 2**i <= smallest]
    return {f"pass@{k}": mean(1 - math.comb(n - c, k) / math.comb(n, k) for n, c in correct) for k in powers}


def pass_rates(args: Namespace, samples: Sequence[Sample]) -> dict[str, float]:
    """pass@k over the prompts of `samples`; correct means a reward of exactly 1."""
    return pass_at_k([(len(rewards), rewards.count(1)) for rewards in rewards_by_prompt(args, samples)])


def reward_categories(args: Namespace, samples: Sequence[Sample]) -> dict[str, float]:
    """Share of samples per value of `--log-reward-category` in a dict reward."""
    counts: dict[str, int] = defaultdict(int)
    for sample in samples:
        if isinstance(sample.reward, dict) and args.log_reward_category in sample.reward:
            counts[f"error_cat/{sample.reward[args.log_reward_category]}"] += 1
    return {name: count / len(samples) for name, count in counts.items()}


def multi_turn_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Response lengths with and without observations, and rounds, of multi-turn samples."""
    metrics = describe("multi_turn/raw_response_length", [s.response_length for s in samples])
    metrics |= describe("multi_turn/wo_obs_response_length", [s.effective_response_length for s in samples])
    rounds = [s.metadata["round_number"] for s in samples if "round_number" in s.metadata]
    stats = describe("round_number", rounds)
    return metrics | {f"multi_turn/multi_turn_metric/{name.replace('/', '_')}": value for name, value in stats.items()}


def engine_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """What the engines report: draft tokens accepted under speculative decoding, prompt tokens found in the cache.

    `spec_accept_length` is tokens per verification, the model's own token included.
    """
    spec, cache = _totals(s.spec_info for s in samples), _totals(s.prefix_cache_info for s in samples)
    metrics = {}
    if spec.get("draft_tokens"):
        metrics["spec_accept_rate"] = spec["accepted_tokens"] / spec["draft_tokens"]
    if spec.get("verify_steps"):
        metrics["spec_accept_length"] = spec["completion_tokens"] / spec["verify_steps"]
    if cache.get("prompt_tokens"):
        metrics["prefix_cache_hit_rate"] = cache["cached_tokens"] / cache["prompt_tokens"]
        metrics["prefix_cache_tokens_per_sample"] = cache["cached_tokens"] / len(samples)
    return metrics


def _totals(counters: Iterable[dict[str, float] | None]) -> dict[str, float]:
    totals: dict[str, float] = defaultdict(float)
    for counter in counters:
        for name, value in (counter or {}).items():
            totals[name] += value
    return totals


def sample_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """What is true of any list of samples: lengths, truncation, repetition."""
    return {
        **describe("response_len", [s.effective_response_length for s in samples]),
        "truncated_ratio": mean(s.truncated for s in samples),
        "repetition_frac": mean(has_repetition(s.response) for s in samples),
    }


def rollout_metrics(args: Namespace, samples: Sequence[Sample], seconds: float, num_gpus: int) -> dict[str, float]:
    """All metrics of one training rollout that took `seconds` on `num_gpus` worker slots."""
    scored = [s for s in samples if s.reward is not None and (args.reward_key or not isinstance(s.reward, dict))]
    metrics: dict[str, float] = sample_metrics(samples) | engine_metrics(samples)
    metrics |= zero_std_counts(args, scored)
    if args.log_reward_category:
        metrics |= reward_categories(args, samples)
    out = {f"rollout/{name}": value for name, value in metrics.items()}
    if args.log_correct_samples:
        correct = [s for s in scored if s.get_reward_value(args) == 1]
        out |= {f"rollout/correct/{name}": value for name, value in sample_metrics(correct).items()}
        out["rollout/correct/count"] = len(correct)
    if args.log_multi_turn:
        out |= multi_turn_metrics(samples)
    if args.log_passrate:
        out |= {f"passrate/{name}": value for name, value in pass_rates(args, scored).items()}
    return out | speed_metrics(samples, seconds, num_gpus)


def speed_metrics(samples: Sequence[Sample], seconds: float, num_gpus: int) -> dict[str, float]:
    """Response tokens per second, all and trained ("effective") ones; the longest sample bounds the rollout."""
    if seconds <= 0 or not samples:
        return {"perf/rollout_time": seconds}
    raw = [s.response_length for s in samples]
    effective = [s.effective_response_length for s in samples]
    return {
        "perf/rollout_time": seconds,
        "perf/tokens_per_gpu_per_sec": sum(raw) / seconds / num_gpus,
        "perf/effective_tokens_per_gpu_per_sec": sum(effective) / seconds / num_gpus,
        "perf/longest_sample_tokens_per_sec": max(raw) / seconds,
        "perf/longest_effective_sample_tokens_per_sec": max(effective) / seconds,
        "perf/non_generation_time": mean(s.non_generation_time for s in samples),
    }


def eval_metrics(args: Namespace, data: dict[str, dict[str, Any]]) -> dict[str, float]:
    """`eval/{name}` (mean reward) per data set of an evaluation's output, and what its samples say.

    That is `-truncated_ratio`, `/response_len/...`, `/repetition_frac`, with `--log-passrate` `-pass@k`, with
    `--log-reward-category` `/error_cat/...` and with `--log-multi-turn` `/multi_turn/...`.
    """
    out: dict[str, float] = {}
    for name, result in data.items():
        out[f"eval/{name}"] = mean(result["rewards"])
        if "truncated" in result:
            out[f"eval/{name}-truncated_ratio"] = mean(result["truncated"])
        samples: list[Sample] = result.get("samples") or []
        if samples:
            out |= _eval_sample_metrics(args, f"eval/{name}", samples, result["rewards"])
    return out


def _eval_sample_metrics(
    args: Namespace, prefix: str, samples: Sequence[Sample], rewards: Sequence[float]
) -> dict[str, float]:
    out = describe(f"{prefix}/response_len", [s.effective_response_length for s in samples])
    out[f"{prefix}/repetition_frac"] = mean(has_repetition(s.response) for s in samples)
    if args.log_passrate:
        reward_of = {id(sample): reward for sample, reward in zip(samples, rewards, strict=True)}
        groups = group_by_prompt(samples)
        trajectories = [trajectory_rewards(group, [reward_of[id(s)] for s in group]) for group in groups]
        rates = pass_at_k([(len(values), values.count(1)) for values in trajectories])
        out |= {f"{prefix}-{k}": value for k, value in rates.items()}
    extra: dict[str, float] = {}
    if args.log_reward_category:
        extra |= reward_categories(args, samples)
    if args.log_multi_turn:
        extra |= multi_turn_metrics(samples)
    return out | {f"{prefix}/{name}": value for name, value in extra.items()}
