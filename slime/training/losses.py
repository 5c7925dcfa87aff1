"""Losses of one micro-batch. Per-token formulas first, then what puts them together by `args`.

All take `reduce` of `slime.training.reducers`, so packing, aggregation and parallelism stay out of here. Metrics are
reduced values: their sum over micro-batches and DP ranks is the mean over the global batch.
"""

from __future__ import annotations

from argparse import Namespace

import torch

from slime.training.batch import MicroBatch
from slime.training.kl import approx_kl
from slime.training.reducers import Reducer

LossOutput = tuple[torch.Tensor, dict[str, torch.Tensor]]


def compute_loss(
    args: Namespace,
    mb: MicroBatch,
    log_probs_R: torch.Tensor,
    entropy_R: torch.Tensor | None,
    reduce: Reducer,
    logits: torch.Tensor | None = None,
) -> LossOutput:
    """The loss that `args.loss_type` names.

    Args:
        log_probs_R: log-probs of the response tokens under the current policy, with graph.
        entropy_R: with graph only if `args.entropy_coef` is not 0; not needed for SFT and custom losses.
        logits: [1, T, V] of the packed row, not divided by the temperature; only custom losses need them.
    """
    if args.loss_type == "policy_loss":
        return compute_policy_loss(args, mb, log_probs_R, entropy_R, reduce)
    if args.loss_type == "sft_loss":
        return compute_sft_loss(args, mb, log_probs_R, reduce)
    if args.loss_type == "custom_loss":
        return compute_custom_loss(args, mb, logits, reduce)
    raise ValueError(f"unknown --loss-type {args.loss_type!r}: choose policy_loss, sft_loss or custom_loss")


def clipped_policy_loss(
    log_ratio: torch.Tensor,
    advantages: torch.Tensor,
    eps_clip: float,
    eps_clip_high: float,
    eps_clip_c: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """PPO's clipped surrogate (arXiv 1707.06347, eq. 7) per token, and where the clip is active (0 / 1).

    Args:
        log_ratio: old - current log-prob, so rho = exp(-log_ratio).
        eps_clip_high: upper bound 1 + eps_clip_high (clip-higher, arXiv 2503.14476).
        eps_clip_c: dual clip (arXiv 1912.09729, eq. 5): the loss of a negative advantage is at most -eps_clip_c * A.
    """
    ratio = torch.exp(-log_ratio)
    unclipped = -ratio * advantages
    clipped = -ratio.clamp(1 - eps_clip, 1 + eps_clip_high) * advantages
    loss = torch.maximum(unclipped, clipped)
    if eps_clip_c is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -eps_clip_c * advantages), loss)
    return loss, (clipped > unclipped).to(loss.dtype)


def cispo_loss(
    log_ratio: torch.Tensor,
    log_probs: torch.Tensor,
    advantages: torch.Tensor,
    eps_clip: float,
    eps_clip_high: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """CISPO (arXiv 2506.13585, eq. 4) per token, and where it clips: REINFORCE times the clipped, detached ratio."""
    ratio = torch.exp(-log_ratio.detach())
    weight = ratio.clamp(1 - eps_clip, 1 + eps_clip_high)
    return -weight * advantages * log_probs, (weight != ratio).to(log_probs.dtype)


def sequence_mean(mb: MicroBatch, x_R: torch.Tensor) -> torch.Tensor:
    """Each sample's masked mean of `x_R`, on every one of its tokens [R]. GSPO's ratio (arXiv 2507.18071, eq. 7)."""
    lengths = torch.tensor(mb.response_lengths, device=x_R.device, dtype=torch.int64)
    owner = torch.arange(len(lengths), device=x_R.device).repeat_interleave(lengths, output_size=x_R.shape[0])
    mask = mb.loss_masks.to(x_R.dtype)
    totals = x_R.new_zeros(len(lengths)).index_add(0, owner, x_R * mask)
    counts = x_R.new_zeros(len(lengths)).index_add(0, owner, mask).clamp(min=1)
    return (totals / counts)[owner]


def compute_policy_loss(
    args: Namespace,
    mb: MicroBatch,
    log_probs_R: torch.Tensor,
    entropy_R: torch.Tensor,
    reduce: Reducer,
) -> LossOutput:
    """pg_loss - entropy_coef * entropy + kl_loss_coef * KL.

    The old policy is `mb.rollout_log_probs` under `--use-rollout-logprobs`, else `mb.old_log_probs`; when that is None
    (the separate log-prob pass was skipped) it is the current policy, detached.

    Metrics: loss, pg_loss, entropy_loss, pg_clipfrac, ppo_kl; kl_loss with `--use-kl-loss`;
    train_rollout_logprob_abs_diff when there are rollout log-probs.
    """
    mask = mb.loss_masks != 0
    train_log_probs = log_probs_R.detach() if mb.old_log_probs is None else mb.old_log_probs
    old = _required(mb.rollout_log_probs, "rollout_log_probs") if args.use_rollout_logprobs else train_log_probs
    # Masked positions may hold anything; a zero there keeps values and gradients finite.
    advantages = torch.where(mask, _required(mb.advantages, "advantages"), 0.0)
    log_ratio = torch.where(mask, old - log_probs_R, 0.0)
    if args.advantage_estimator == "gspo":
        log_ratio = sequence_mean(mb, log_ratio)
    if args.advantage_estimator == "cispo":
        pg, clipped = cispo_loss(log_ratio, log_probs_R, advantages, args.eps_clip, args.eps_clip_high)
    else:
        pg, clipped = clipped_policy_loss(log_ratio, advantages, args.eps_clip, args.eps_clip_high, args.eps_clip_c)
    pg_loss, entropy = reduce(pg), reduce(entropy_R)
    metrics = {
        "pg_loss": pg_loss,
        "entropy_loss": entropy,
        "pg_clipfrac": reduce(clipped),
        "ppo_kl": reduce(log_ratio),
    }
    loss = pg_loss
    if args.entropy_coef != 0:
        loss = loss - args.entropy_coef * entropy
    if args.use_kl_loss:
        ref = torch.where(mask, _required(mb.ref_log_probs, "ref_log_probs"), log_probs_R.detach())
        ratio = None
        if args.use_unbiased_kl:
            ratio = torch.exp(torch.where(mask, log_probs_R - old, 0.0))
        metrics["kl_loss"] = reduce(approx_kl(log_probs_R, ref, args.kl_loss_type, ratio))
        loss = loss + args.kl_loss_coef * metrics["kl_loss"]
    if mb.rollout_log_probs is not None:
        difference = (train_log_probs - mb.rollout_log_probs).abs()
        metrics["train_rollout_logprob_abs_diff"] = reduce(difference)
    return loss, _detached(metrics, loss)


def compute_sft_loss(args: Namespace, mb: MicroBatch, log_probs_R: torch.Tensor, reduce: Reducer) -> LossOutput:
    """Negative log-likelihood of the unmasked response tokens. Metrics: loss."""
    loss = -reduce(log_probs_R)
    return loss, _detached({}, loss)


def compute_value_loss(args: Namespace, mb: MicroBatch, values_R: torch.Tensor, reduce: Reducer) -> LossOutput:
    """The critic's loss: max((V - R)^2, (V_old + clamp(V - V_old, +-value_clip) - R)^2), without a factor 1/2.

    Args:
        values_R: the critic's output where each response token is predicted, not divided by a temperature. V_old and
            R are `mb.values` and `mb.returns`.

    Metrics: loss, value_loss, value_clipfrac (where the clipped term is the larger one).
    """
    mask = mb.loss_masks != 0
    # Masked positions may hold anything; zeros there keep values and gradients finite.
    old = torch.where(mask, _required(mb.values, "values"), 0.0)
    returns = torch.where(mask, _required(mb.returns, "returns"), 0.0)
    values = torch.where(mask, values_R, 0.0)
    unclipped = (values - returns).square()
    clipped = (old + (values - old).clamp(-args.value_clip, args.value_clip) - returns).square()
    loss = reduce(torch.maximum(unclipped, clipped))
    metrics = {"value_loss": loss, "value_clipfrac": reduce((clipped > unclipped).to(values.dtype))}
    return loss, _detached(metrics, loss)


def compute_custom_loss(args: Namespace, mb: MicroBatch, logits: torch.Tensor, reduce: Reducer) -> LossOutput:
    """`--custom-loss-function-path`: `fn(args, batch, logits, sum_of_sample_mean) -> (loss, dict of scalars)`.

    `batch` is `mb.to_rollout_batch()`; `sum_of_sample_mean` is `reduce`.
    """
    from slime.utils.misc import load_function

    function = load_function(args.custom_loss_function_path, "--custom-loss-function-path")
    loss, metrics = function(args, mb.to_rollout_batch(), _required(logits, "logits"), reduce)
    return loss, _detached(metrics, loss)


def _required(value: torch.Tensor | None, name: str) -> torch.Tensor:
    if value is None:
        raise ValueError(f"the loss needs {name}, but the micro-batch has none")
    return value


def _detached(metrics: dict, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        name: torch.as_tensor(value, device=loss.device).detach() for name, value in {"loss": loss, **metrics}.items()
    }
