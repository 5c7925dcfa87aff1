"""Metrics of the whole data-parallel world."""

from __future__ import annotations

import resource

import torch
import torch.distributed as dist

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


def memory_metrics(device: torch.device) -> dict[str, float]:
    """Peak memory of this rank so far, in GB."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        return {
            "perf/trainer_memory_gb": torch.cuda.memory_allocated(device) / 1e9,
            "perf/trainer_peak_gb": peak / 1e9,
        }
    return {"perf/trainer_peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9}
