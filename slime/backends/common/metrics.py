"""Metrics of the whole data-parallel world."""

from __future__ import annotations

import functools
import json
import resource
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from slime.training.flops import ModelFlops
from slime.training.rollout_data import RankData

TOKEN_KEYS = ("log_probs", "ref_log_probs", "rollout_log_probs", "advantages", "returns", "values", "entropy", "kl")


def sum_over_ranks(
    values: dict[str, torch.Tensor], group: dist.ProcessGroup, device: torch.device
) -> dict[str, float]:
    """Sum of each scalar over the ranks of `group`, in one all-reduce; all must have the same keys."""
    if not values:
        return {}
    names = sorted(values)
    stacked = torch.stack([torch.as_tensor(values[name], dtype=torch.float64, device=device) for name in names])
    dist.all_reduce(stacked, group=group)
    return dict(zip(names, stacked.tolist(), strict=True))


def rollout_means(data: RankData, group: dist.ProcessGroup, device: torch.device) -> dict[str, float]:
    """`rollout/{key}`: mean over samples of the masked mean over tokens, for the per-token keys that are there."""
    keys = [key for key in TOKEN_KEYS if key in data]
    totals = {"count": torch.tensor(float(data.num_samples))}
    for key in keys:
        means = [
            torch.where(mask.to(value.device) != 0, value, 0.0).double().sum()
            / mask.sum().clamp(min=1).to(value.device)
            for value, mask in zip(data[key], data["loss_masks"], strict=True)
        ]
        totals[key] = torch.stack(means).sum() if means else torch.tensor(0.0)
    sums = sum_over_ranks(totals, group, device)
    return {f"rollout/{key}": sums[key] / sums["count"] for key in keys}


def speed_metrics(
    times: dict[str, float],
    role: str,
    checkpoint: str,
    total_lengths: Sequence[int],
    group: dist.ProcessGroup,
    device: torch.device,
) -> dict[str, float]:
    """Tokens per second, the share of waiting, and TFLOP/s per device of each pass that `times` has.

    Args:
        times: `perf/{timer}_time` of this rollout, with train_wait, train and `{role}_train`.
        total_lengths: of the samples of this rank; `group` are the ranks with other samples.
    """
    flops = model_flops(checkpoint)
    forward = 0 if flops is None else sum(flops.forward(length) for length in total_lengths)
    mine = {"tokens": sum(total_lengths), "flops": forward}
    sums = sum_over_ranks(
        {name: torch.tensor(float(value), dtype=torch.float64) for name, value in mine.items()}, group, device
    )
    wait, train = times["perf/train_wait_time"], times["perf/train_time"]
    out = {
        "perf/step_time": wait + train,
        "perf/wait_time_ratio": wait / (wait + train),
        f"perf/{role}_train_tok_per_s": sums["tokens"] / times[f"perf/{role}_train_time"],
    }
    for name, passes in (("log_probs", 1), ("ref_log_probs", 1), (f"{role}_train", 3)):
        seconds = times.get(f"perf/{name}_time")
        if flops is not None and seconds:
            out[f"perf/{name}_tflops"] = passes * sums["flops"] / seconds / dist.get_world_size() / 1e12
    return out


@functools.cache
def model_flops(checkpoint: str) -> ModelFlops | None:
    """Of a checkpoint directory; None for an architecture whose config.json does not name its sizes as others do."""
    config = json.loads((Path(checkpoint) / "config.json").read_text(encoding="utf-8"))
    try:
        return ModelFlops.of_hf_config(config)
    except ValueError:
        return None


def memory_metrics(device: torch.device) -> dict[str, float]:
    """Peak memory of this rank so far, in GB."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        return {
            "perf/trainer_memory_gb": torch.cuda.memory_allocated(device) / 1e9,
            "perf/trainer_peak_gb": peak / 1e9,
        }
    return {"perf/trainer_peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9}
