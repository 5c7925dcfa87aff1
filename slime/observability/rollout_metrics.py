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


def zero_std_counts(args: Namespace, samples: Sequence[Sample]) -> dict[str, int]:
    """Groups whose samples all have the same reward, counted per reward: they carry no GRPO signal."""
    counts: dict[str, int] = defaultdict(int)
    for group in group_by_prompt(samples):
        rewards = {sample.get_reward_value(args) for sample in group}
        if len(group) > 1 and len(rewards) == 1:
            counts[f"zero_std/count_{round(rewards.pop(), 1):g}"] += 1
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
    groups = group_by_prompt(samples)
    return pass_at_k([(len(g), sum(s.get_reward_value(args) == 1 for s in g)) for g in groups])


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


def sample_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """What is true of any list of samples: lengths, truncation, repetition."""
    return {
        **describe("response_len", [s.effective_response_length for s in samples]),
        "truncated_ratio": mean(s.truncated for s in samples),
        "repetition_frac": mean(has_repetition(s.response) for s in samples),
    }


def rollout_metrics(args: Namespace, samples: Sequence[Sample], seconds: float, num_gpus: int) -> dict[str, float]:
    """All metrics of one training rollout that took `seconds` on `num_gpus` worker slots."""
    scored = [s for s in samples if s.reward is not None]
    metrics: dict[str, float] = dict(sample_metrics(samples))
    metrics |= zero_std_counts(args, scored)
    if args.log_reward_category:
        metrics |= reward_categories(args, scored)
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
    """`eval/{name}` (mean reward), truncation, lengths and pass@k per dataset of an evaluation's output."""
    out: dict[str, float] = {}
    for name, result in data.items():
        out[f"eval/{name}"] = mean(result["rewards"])
        samples: list[Sample] = result.get("samples") or []
        if "truncated" in result:
            out[f"eval/{name}-truncated_ratio"] = mean(result["truncated"])
        if samples:
            lengths = [s.effective_response_length for s in samples]
            out |= describe(f"eval/{name}/response_len", lengths)
            out[f"eval/{name}/repetition_frac"] = mean(has_repetition(s.response) for s in samples)
        if args.log_passrate and samples:
            by_prompt: dict[Any, list[float]] = defaultdict(list)
            for sample, reward in zip(samples, result["rewards"], strict=True):
                by_prompt[sample.group_index].append(reward)
            rates = pass_at_k([(len(r), sum(x == 1 for x in r)) for r in by_prompt.values()])
            out |= {f"eval/{name}-{k}": value for k, value in rates.items()}
    return out
