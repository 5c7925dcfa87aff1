"""Masked importance sampling: a correction with levels, bounds and a veto.

`--use-tis --custom-tis-function-path slime.training.mis.mis_function`, set by the `--mis-*` flags.
"""

from __future__ import annotations

from argparse import Namespace

import torch

from slime.training.corrections import Correction

LOG_RATIO_BOUND = 20.0
"""exp of more than this is of no use, and of much more infinite."""


def mis_function(
    *,
    args: Namespace,
    pg_loss: torch.Tensor,
    train_log_probs: list[torch.Tensor],
    rollout_log_probs: list[torch.Tensor],
    loss_masks: list[torch.Tensor],
    **kwargs,
) -> Correction:
    """Weigh, bound or mask by the ratio of the trainer's to the engine's probability (`slime.training.corrections`).

    `--mis-level`: each token's own ratio (token), the product of the sequence's unmasked ones (sequence), or their
    geometric mean (geometric). `--mis-mode`: the weight is the ratio in [0, upper] (truncate), in [lower, upper]
    (clip), or the ratio itself while tokens with one outside [lower, upper] leave the loss (mask). A sequence with
    an unmasked token whose own ratio is below `--mis-veto-threshold` leaves it, too.

    Metrics: mis_ratio (before the bounds), mis_weight (what the loss is multiplied with, 0 where masked),
    mis_low_frac and mis_high_frac (outside the bounds), mis_veto_frac, mis_kl and mis_k3_kl (estimates of
    KL(engine || trainer)).
    """
    lower, upper = args.mis_lower_bound, args.mis_upper_bound
    log_ratios = [train - rollout for train, rollout in zip(train_log_probs, rollout_log_probs, strict=True)]
    pairs = list(zip(log_ratios, loss_masks, strict=True))
    ratio = torch.cat([_level(args.mis_level, d, m) for d, m in pairs]).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    vetoed = torch.cat([_vetoed(args.mis_veto_threshold, d, m) for d, m in pairs])
    low, high = ratio < lower, ratio > upper
    if args.mis_mode == "truncate":
        low = torch.zeros_like(low)
        weight = ratio.clamp(max=upper)
    elif args.mis_mode == "clip":
        weight = ratio.clamp(lower, upper)
    else:
        weight = ratio
    kept = vetoed == 0
    if args.mis_mode == "mask":
        kept &= ~(low | high)
    sizes = [len(mask) for mask in loss_masks]
    modified = [mask * keep for mask, keep in zip(loss_masks, kept.split(sizes), strict=True)]
    log_ratio = torch.cat(log_ratios)
    metrics = {
        "mis_ratio": ratio,
        "mis_weight": weight * kept,
        "mis_low_frac": low.to(ratio.dtype),
        "mis_high_frac": high.to(ratio.dtype),
        "mis_veto_frac": vetoed.to(ratio.dtype),
        "mis_kl": -log_ratio,
        "mis_k3_kl": log_ratio.exp() - 1 - log_ratio,
    }
    return pg_loss * weight, modified, metrics


def _level(level: str, log_ratio: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    if level == "token":
        return log_ratio
    total = (log_ratio * mask).sum()
    if level == "geometric":
        total = total / mask.sum().clamp(min=1)
    return total.expand_as(log_ratio)


def _vetoed(threshold: float | None, log_ratio: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    if threshold is None:
        return torch.zeros_like(log_ratio)
    return ((log_ratio.exp() < threshold) & (mask != 0)).any().to(log_ratio.dtype).expand_as(log_ratio)
