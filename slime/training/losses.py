"""Losses of one micro-batch. Per-token formulas first, then what puts them together by `args`.

All take `reduce` of `slime.training.reducers`, so packing, aggregation and parallelism stay out of here. Metrics are
reduced values: their sum over micro-batches and DP ranks is the mean over the global batch.
"""

from __future__ import annotations

from argparse import Namespace

import torch

from slime.training.batch import MicroBatch
from slime.training.corrections import opsm_dropped, vanilla_tis_function
from slime.training.kl import MAX_EXPONENT, approx_kl
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
        log_ratio: old - current log-prob, so rho = exp(-log_ratio), or exp(MAX_EXPONENT) where that is less.
        eps_clip_high: upper bound 1 + eps_clip_high (clip-higher, arXiv 2503.14476).
        eps_clip_c: dual clip (arXiv 1912.09729, eq. 5): the loss of a negative advantage is at most -eps_clip_c * A.
    """
    ratio = torch.exp((-log_ratio).clamp(max=MAX_EXPONENT))
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

    Metrics: loss, pg_loss, entropy_loss, pg_clipfrac, ppo_kl; kl_loss with `--use-kl-loss`; opsm_clipfrac with
    `--use-opsm`; ois (the ratio to the old policy) and those of the correction with `--use-tis` or
    `--get-mismatch-metrics`; opd_reverse_kl with `--use-opd`; train_rollout_logprob_abs_diff when there are rollout
    log-probs.
    """
    mask = mb.loss_masks != 0
    train_log_probs = log_probs_R.detach() if mb.old_log_probs is None else mb.old_log_probs
    old = _required(mb.rollout_log_probs, "rollout_log_probs") if args.use_rollout_logprobs else train_log_probs
    # Masked positions may hold anything; a zero there keeps values and gradients finite.
    log_ratio = torch.where(mask, old - log_probs_R, 0.0)
    pg, metrics = _token_losses(args, mb, log_ratio, log_probs_R)
    metrics["entropy_loss"] = entropy_R
    loss_masks = mb.loss_masks
    if args.use_tis or args.get_mismatch_metrics:
        corrected, modified, of_correction = _correct(args, mb, pg, train_log_probs)
        metrics |= {"ois": torch.exp(-metrics["ppo_kl"].detach()), **of_correction}
        if args.use_tis:
            pg, loss_masks = corrected, modified
    if args.use_kl_loss:
        ref = torch.where(mask, _required(mb.ref_log_probs, "ref_log_probs"), log_probs_R.detach())
        rho = None
        if args.use_unbiased_kl:
            rho = torch.exp(torch.where(mask, log_probs_R - old, 0.0).clamp(max=MAX_EXPONENT))
        metrics["kl_loss"] = approx_kl(log_probs_R, ref, args.kl_loss_type, rho)
    if mb.opd_reverse_kl is not None:
        metrics["opd_reverse_kl"] = mb.opd_reverse_kl
    if mb.rollout_log_probs is not None:
        metrics["train_rollout_logprob_abs_diff"] = (train_log_probs - mb.rollout_log_probs).abs()

    reduced = {name: reduce(value) for name, value in metrics.items()}
    loss = reduced["pg_loss"] = _reduce_pg(args, mb, torch.where(mask, pg, 0.0), loss_masks, reduce)
    if args.entropy_coef != 0:
        loss = loss - args.entropy_coef * reduced["entropy_loss"]
    if args.use_kl_loss:
        loss = loss + args.kl_loss_coef * reduced["kl_loss"]
    return loss, _detached(reduced, loss)


def _token_losses(
    args: Namespace, mb: MicroBatch, log_ratio: torch.Tensor, log_probs: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(loss, metrics) per token, before corrections. `log_ratio` (old - current) is 0 where masked."""
    advantages = torch.where(mb.loss_masks != 0, _required(mb.advantages, "advantages"), 0.0)
    of_sequence = sequence_mean(mb, log_ratio) if args.advantage_estimator == "gspo" or args.use_opsm else None
    if args.advantage_estimator == "gspo":
        log_ratio = of_sequence
    if args.advantage_estimator == "cispo":
        pg, clipped = cispo_loss(log_ratio, log_probs, advantages, args.eps_clip, args.eps_clip_high)
    else:
        pg, clipped = clipped_policy_loss(log_ratio, advantages, args.eps_clip, args.eps_clip_high, args.eps_clip_c)
    metrics = {"pg_clipfrac": clipped, "ppo_kl": log_ratio}
    if args.use_opsm:
        metrics["opsm_clipfrac"] = opsm_dropped(advantages, of_sequence, args.opsm_delta)
        pg = pg * (1 - metrics["opsm_clipfrac"])
    return pg, metrics


def _correct(
    args: Namespace, mb: MicroBatch, pg_R: torch.Tensor, train_log_probs_R: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """(corrected token losses, modified mask, token metrics), all [R], of `--custom-tis-function-path` or TIS.

    Raises:
        ValueError: what a custom function returned has another shape.
    """
    function = vanilla_tis_function
    if args.custom_tis_function_path is not None:
        from slime.utils.misc import load_hook

        function = load_hook(args.custom_tis_function_path, "--custom-tis-function-path")
    mask = mb.loss_masks != 0
    rollout = _required(mb.rollout_log_probs, "rollout_log_probs")

    def split(flat: torch.Tensor) -> list[torch.Tensor]:
        return mb.split(flat) or [flat]

    pg, masks, metrics = function(
        args=args,
        pg_loss=pg_R,
        train_log_probs=split(torch.where(mask, train_log_probs_R, 0.0)),
        rollout_log_probs=split(torch.where(mask, rollout, 0.0)),
        loss_masks=split(mb.loss_masks),
        total_lengths=mb.total_lengths or [mb.tokens.shape[0]],
        response_lengths=mb.response_lengths or [0],
    )
    modified = torch.cat(list(masks))
    for name, value in {"pg_loss": pg, "modified_masks": modified, **metrics}.items():
        if value.shape != pg_R.shape:
            raise ValueError(
                f"{args.custom_tis_function_path}: {name} has the shape {tuple(value.shape)}, but there are "
                f"{len(pg_R)} response tokens"
            )
    return pg, modified, {name: value.detach() for name, value in metrics.items()}


def _reduce_pg(
    args: Namespace, mb: MicroBatch, pg_R: torch.Tensor, loss_masks_R: torch.Tensor, reduce: Reducer
) -> torch.Tensor:
    """pg_loss over `loss_masks_R`, by `--custom-pg-loss-reducer-function-path` or `reduce`.

    Masks that a correction changed take tokens out of the sum, while the denominators stay those of the rollout. A
    custom reducer returns a sum over samples (over tokens with `--calculate-per-token-loss`).
    """
    if args.custom_pg_loss_reducer_function_path is None:
        return reduce(torch.where(loss_masks_R != 0, pg_R * loss_masks_R, 0.0))
    from slime.utils.misc import load_hook

    make = load_hook(args.custom_pg_loss_reducer_function_path, "--custom-pg-loss-reducer-function-path")
    reducer = make(mb.total_lengths, mb.response_lengths, mb.split(loss_masks_R), args.calculate_per_token_loss)
    if not mb.response_lengths:
        return pg_R.sum()
    return reducer(pg_R) / (mb.num_tokens if args.calculate_per_token_loss else mb.num_rollouts)


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
    from slime.utils.misc import load_hook

    function = load_hook(args.custom_loss_function_path, "--custom-loss-function-path")
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
