"""Corrections of the mismatch between the policy that generated a token and the one that trains on it.

The engine's log-probs (mu) and the trainer's own log-probs of the same weights (old) differ a little by kernels and
precision, and more when samples are stale. A correction weighs or drops tokens by w = exp(old - mu).

A correction function is called by keyword with the token losses and whole samples, under any parallelism:

    fn(*, args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths, **kwargs)
        -> (pg_loss, modified_masks, metrics)

`pg_loss` is [R], the response tokens of all samples one after the other; `train_log_probs`, `rollout_log_probs` and
`loss_masks` are lists of [response_length] per sample (a micro-batch without samples has one of length 0).
`modified_masks` can take tokens out of the loss; what the loss is divided by stays as it was. `metrics` are [R] each
and are averaged over the unmodified mask.
"""

from __future__ import annotations

from argparse import Namespace

import torch

Correction = tuple[torch.Tensor, list[torch.Tensor], dict[str, torch.Tensor]]


def vanilla_tis_function(
    *,
    args: Namespace,
    pg_loss: torch.Tensor,
    train_log_probs: list[torch.Tensor],
    rollout_log_probs: list[torch.Tensor],
    loss_masks: list[torch.Tensor],
    **kwargs,
) -> Correction:
    """Truncated importance sampling (https://fengyao.notion.site/off-policy-rl): weight clamped to
    [tis_clip_low, tis_clip].

    Metrics: tis (the weight before the bounds), tis_clipfrac (where they changed it), tis_abs (|w - 1|).
    """
    ratio = _ratio(train_log_probs, rollout_log_probs)
    weight = ratio.clamp(args.tis_clip_low, args.tis_clip)
    return pg_loss * weight, loss_masks, _tis_metrics(ratio, weight)


def icepop_function(
    *,
    args: Namespace,
    pg_loss: torch.Tensor,
    train_log_probs: list[torch.Tensor],
    rollout_log_probs: list[torch.Tensor],
    loss_masks: list[torch.Tensor],
    **kwargs,
) -> Correction:
    """IcePop (https://ringtech.notion.site/icepop): tokens with a weight outside [tis_clip_low, tis_clip] count 0.

    Metrics as in `vanilla_tis_function`.
    """
    ratio = _ratio(train_log_probs, rollout_log_probs)
    weight = torch.where((ratio >= args.tis_clip_low) & (ratio <= args.tis_clip), ratio, 0.0)
    return pg_loss * weight, loss_masks, _tis_metrics(ratio, weight)


def _ratio(train_log_probs: list[torch.Tensor], rollout_log_probs: list[torch.Tensor]) -> torch.Tensor:
    return torch.exp(torch.cat(train_log_probs) - torch.cat(rollout_log_probs))


def _tis_metrics(ratio: torch.Tensor, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"tis": ratio, "tis_clipfrac": (weight != ratio).to(ratio.dtype), "tis_abs": (ratio - 1).abs()}


def opsm_dropped(advantages: torch.Tensor, sequence_log_ratio: torch.Tensor, delta: float) -> torch.Tensor:
    """Off-policy sequence masking (DeepSeek-V3.2, arXiv 2512.02556): 1 where a token is dropped.

    A token counts 0 when its advantage is negative and the policy has moved away from its sequence: the mean of
    old - current log-prob exceeds `delta`.

    Args:
        sequence_log_ratio: [R]; that mean on every token of the sequence.
    """
    return ((advantages < 0) & (sequence_log_ratio.detach() > delta)).to(sequence_log_ratio.dtype)
