"""From per-token values of a micro-batch to its share of the global batch's scalar."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from slime.training.batch import MicroBatch

Reducer = Callable[[torch.Tensor], torch.Tensor]


def make_reducer(mb: MicroBatch, per_token: bool) -> Reducer:
    """`reduce(x_R) -> scalar`; its sum over all micro-batches and DP ranks is the value of the global batch.

    Sample mean: sum over samples of (sum_t x m / denominator) / num_rollouts. Per token: sum_t x m / num_tokens.
    Nothing depends on how the step was cut. A backend that averages gradients over DP ranks multiplies the loss by
    their number before backward. Masked positions do not count, not even when x is NaN there.
    """
    mask = mb.loss_masks != 0
    if per_token:
        weights = mb.loss_masks.double() / mb.num_tokens
    else:
        lengths = torch.tensor(mb.response_lengths, device=mb.denominators.device, dtype=torch.int64)
        total = mb.loss_masks.shape[0]
        denominators = mb.denominators.double().repeat_interleave(lengths, output_size=total)
        weights = mb.loss_masks.double() / denominators / mb.num_rollouts

    def reduce(x_R: torch.Tensor) -> torch.Tensor:
        return (torch.where(mask, x_R, 0.0) * weights.to(x_R.dtype)).sum()

    return reduce


def get_sum_of_sample_mean(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    loss_masks: Sequence[torch.Tensor],
    calculate_per_token_loss: bool = False,
) -> Reducer:
    """`reduce(x_R) -> scalar` for plug-ins: a sum over whole samples, not scaled to the global batch.

    The sum of the samples' masked means, each over at least one token; with `calculate_per_token_loss` the sum of all
    unmasked tokens. This is what `--custom-pg-loss-reducer-function-path` stands for.
    """
    mask_R = torch.cat(list(loss_masks))
    counts = [1.0 if calculate_per_token_loss else float(mask.sum().clamp(min=1)) for mask in loss_masks]
    weights_R = torch.cat([mask.double() / count for mask, count in zip(loss_masks, counts, strict=True)])

    def reduce(x_R: torch.Tensor) -> torch.Tensor:
        return (torch.where(mask_R != 0, x_R, 0.0) * weights_R.to(x_R.dtype)).sum()

    return reduce
