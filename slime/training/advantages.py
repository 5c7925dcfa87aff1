"""Advantages and returns of a whole rollout, on every DP rank for its own samples."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

import torch
import torch.distributed as dist

from slime.training.kl import approx_kl
from slime.training.rollout_data import RankData


def compute_advantages(args: Namespace, data: RankData, dp_group: dist.ProcessGroup | None = None) -> None:
    """Fill `advantages` and `returns` (and `kl` when `args.kl_coef` is not 0) for every sample of `data`.

    `--custom-advantage-function-path` replaces the estimator: `fn(args, rollout_data)` sets
    `rollout_data["advantages"]` and `rollout_data["returns"]`, lists with one [response_length] tensor per sample.
    `--normalize-advantages` then whitens over `dp_group`, a collective call for all its ranks.

    Raises:
        ValueError: unknown estimator, or a custom function that left `advantages` or `returns` out.
    """
    if args.custom_advantage_function_path:
        from slime.utils.misc import load_function

        load_function(args.custom_advantage_function_path, "--custom-advantage-function-path")(args, data)
        missing = [key for key in ("advantages", "returns") if key not in data]
        if missing:
            raise ValueError(
                f"--custom-advantage-function-path {args.custom_advantage_function_path} did not set "
                f"rollout_data[{missing[0]!r}]"
            )
    else:
        _estimate(args, data)
    if args.normalize_advantages:
        data.set_flat("advantages", whiten(data["advantages"], data["loss_masks"], dp_group))


def _estimate(args: Namespace, data: RankData) -> None:
    rewards, masks = data["rewards"], data["loss_masks"]
    kl = _token_kl(args, data)
    if args.advantage_estimator in ("grpo", "gspo", "cispo"):
        advantages = get_grpo_returns(rewards, kl)
    elif args.advantage_estimator == "reinforce_plus_plus":
        advantages = get_reinforce_plus_plus_returns(rewards, kl, masks, args.kl_coef, args.gamma)
    elif args.advantage_estimator == "reinforce_plus_plus_baseline":
        advantages = get_reinforce_plus_plus_baseline_advantages(rewards, kl, args.kl_coef)
    else:
        raise ValueError(f"unknown advantage estimator {args.advantage_estimator!r}")
    data.set_flat("advantages", advantages)
    data.set_flat("returns", advantages)


def _token_kl(args: Namespace, data: RankData) -> list[torch.Tensor]:
    """KL of the old policy to the reference, 0 on masked tokens and everywhere without KL in the reward."""
    masks = data["loss_masks"]
    if args.kl_coef == 0:
        return [torch.zeros_like(mask) for mask in masks]
    old = data["rollout_log_probs" if args.use_rollout_logprobs else "log_probs"]
    kl = []
    for log_probs, ref, mask in zip(old, data["ref_log_probs"], masks, strict=True):
        estimate = approx_kl(log_probs, ref, args.kl_loss_type)
        kl.append(torch.where(mask.to(estimate.device) != 0, estimate, 0.0))
    data.set_flat("kl", kl)
    return kl


def get_grpo_returns(rewards: Sequence[float], kl: list[torch.Tensor]) -> list[torch.Tensor]:
    """Every token of a sample gets its (group-normalised) reward; `kl` gives shape, dtype and device."""
    return [torch.full_like(k, float(reward)) for reward, k in zip(rewards, kl, strict=True)]


def get_reinforce_plus_plus_returns(
    rewards: Sequence[float],
    kl: list[torch.Tensor],
    loss_masks: list[torch.Tensor],
    kl_coef: float,
    gamma: float,
) -> list[torch.Tensor]:
    """REINFORCE++ (arXiv 2501.03262): discounted sum of the token rewards.

    Those are -kl_coef * KL_t m_t, plus the sample's reward on its last unmasked token. A sample with no unmasked
    token has nowhere to put its reward and gets zeros.
    """
    returns = []
    for reward, k, mask in zip(rewards, kl, loss_masks, strict=True):
        mask = mask.to(k.device)
        token_rewards = -kl_coef * k * mask
        unmasked = mask.nonzero()
        if len(unmasked):
            token_rewards[unmasked[-1, 0]] += float(reward)
        returns.append(discounted_returns(token_rewards, gamma))
    return returns


def get_reinforce_plus_plus_baseline_advantages(
    rewards: Sequence[float], kl: list[torch.Tensor], kl_coef: float
) -> list[torch.Tensor]:
    """Group-centred reward minus kl_coef * KL_t on every token."""
    return [float(reward) - kl_coef * k for reward, k in zip(rewards, kl, strict=True)]


def discounted_returns(rewards: torch.Tensor, gamma: float) -> torch.Tensor:
    """G_t = r_t + gamma * G_{t+1} along the last dimension, in log2(T) vector operations.

    Doubling: after pass n each entry holds the discounted sum of the 2^n rewards from its position on.
    """
    out = rewards.clone()
    shift, discount = 1, gamma
    while shift < out.shape[-1] and discount != 0:
        out[..., :-shift] += discount * out[..., shift:]
        shift, discount = 2 * shift, discount * discount
    return out


def whiten(
    values: list[torch.Tensor], loss_masks: list[torch.Tensor], group: dist.ProcessGroup | None = None
) -> list[torch.Tensor]:
    """(a - mean) * rsqrt(var + 1e-8) with the statistics of all unmasked tokens of all ranks of `group`.

    The variance is unbiased (n / (n - 1) for n >= 2 tokens). Sums are in float64. Masked tokens are shifted too.

    Raises:
        ValueError: no unmasked token on any rank.
    """
    stats = torch.zeros(3, dtype=torch.float64)
    if values:
        flat = torch.cat(values)
        kept = flat[torch.cat(loss_masks).to(flat.device) != 0].double()
        stats = torch.stack([kept.sum(), kept.square().sum(), kept.new_tensor(kept.numel())]).cpu()
    if group is not None:
        on_gpu = "nccl" in dist.get_backend(group)
        shared = stats.cuda() if on_gpu else stats
        dist.all_reduce(shared, group=group)
        stats = shared.cpu()
    total, squares, count = stats.tolist()
    if count == 0:
        raise ValueError("cannot normalise advantages: every response token of the rollout is masked")
    mean = total / count
    variance = max(squares / count - mean * mean, 0.0)
    if count >= 2:
        variance *= count / (count - 1)
    scale = (variance + 1e-8) ** -0.5
    return [((value.double() - mean) * scale).to(value.dtype) for value in values]
