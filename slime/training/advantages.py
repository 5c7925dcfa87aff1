"""Advantages and returns of a whole rollout, on every DP rank for its own samples.

Context-parallel ranks of one DP rank hold the same whole samples, so they compute the same and need no exchange.
"""

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
    `--use-opd` then subtracts opd_kl_coef * (old - teacher), kept as `opd_reverse_kl`. `--normalize-advantages` at
    last whitens over `dp_group`, a collective call for all its ranks.

    Raises:
        ValueError: unknown estimator, or a custom function that left `advantages` or `returns` out.
    """
    if args.custom_advantage_function_path:
        from slime.utils.misc import load_hook

        load_hook(args.custom_advantage_function_path, "--custom-advantage-function-path")(args, data)
        missing = [key for key in ("advantages", "returns") if key not in data]
        if missing:
            raise ValueError(
                f"--custom-advantage-function-path {args.custom_advantage_function_path} did not set "
                f"rollout_data[{missing[0]!r}]"
            )
    else:
        _estimate(args, data)
    if args.use_opd:
        _distill(args, data)
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
    elif args.advantage_estimator == "ppo":
        advantages, returns = get_ppo_advantages_and_returns(
            rewards, kl, data["values"], args.kl_coef, args.gamma, args.lambd
        )
        data.set_flat("advantages", advantages)
        data.set_flat("returns", returns)
        return
    elif args.advantage_estimator == "on_policy_distillation":
        advantages = [-d for d in _log_ratio_to_teacher(args, data)]
    else:
        raise ValueError(f"unknown advantage estimator {args.advantage_estimator!r}")
    data.set_flat("advantages", advantages)
    data.set_flat("returns", advantages)


def _old_log_probs(args: Namespace, data: RankData) -> list[torch.Tensor]:
    return data["rollout_log_probs" if args.use_rollout_logprobs else "log_probs"]


def _log_ratio_to_teacher(args: Namespace, data: RankData) -> list[torch.Tensor]:
    """old - teacher, 0 on masked tokens; its mean estimates KL(policy || teacher)."""
    return [
        torch.where(mask.to(old.device) != 0, old - teacher.to(old.device), 0.0)
        for old, teacher, mask in zip(
            _old_log_probs(args, data), data["teacher_log_probs"], data["loss_masks"], strict=True
        )
    ]


def _distill(args: Namespace, data: RankData) -> None:
    """On-policy distillation: every token is paid for how likely the teacher finds it (arXiv 2306.13649)."""
    reverse_kl = _log_ratio_to_teacher(args, data)
    data.set_flat("opd_reverse_kl", reverse_kl)
    pairs = zip(data["advantages"], reverse_kl, strict=True)
    data.set_flat("advantages", [a - args.opd_kl_coef * d.to(a.device) for a, d in pairs])


def _token_kl(args: Namespace, data: RankData) -> list[torch.Tensor]:
    """KL of the old policy to the reference, 0 on masked tokens and everywhere without KL in the reward."""
    masks = data["loss_masks"]
    if args.kl_coef == 0:
        return [torch.zeros_like(mask) for mask in masks]
    kl = []
    for log_probs, ref, mask in zip(_old_log_probs(args, data), data["ref_log_probs"], masks, strict=True):
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
    token_rewards = []
    for reward, k, mask in zip(rewards, kl, loss_masks, strict=True):
        mask = mask.to(k.device)
        paid = -kl_coef * k * mask
        if len(paid):
            last = (mask * torch.arange(1, len(mask) + 1, device=k.device)).argmax()
            paid[last] += float(reward) * (mask[last] != 0).to(paid.dtype)
        token_rewards.append(paid)
    return _discounted_per_sample(token_rewards, gamma)


def get_ppo_advantages_and_returns(
    rewards: Sequence[float],
    kl: list[torch.Tensor],
    values: list[torch.Tensor],
    kl_coef: float,
    gamma: float,
    lambd: float,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Generalised advantage estimation (arXiv 1506.02438, eq. 16) and its value targets A + V.

    Token rewards are -kl_coef * KL_t, plus the sample's reward on its last response token, masked or not. With
    delta_t = r_t + gamma V_{t+1} - V_t and V_{T+1} = 0, A_t is the sum of (gamma lambda)^k delta_{t+k}.

    Args:
        values: [response_length] per sample: the critic's output where token t is predicted.
    """
    deltas = []
    for reward, k, value in zip(rewards, kl, values, strict=True):
        token_rewards = -kl_coef * k.to(value.device, value.dtype)
        if len(token_rewards):
            token_rewards[-1] += float(reward)
        following = torch.nn.functional.pad(value[1:], (0, 1)) if len(value) else value
        deltas.append(token_rewards + gamma * following - value)
    advantages = _discounted_per_sample(deltas, gamma * lambd)
    return advantages, [a + value for a, value in zip(advantages, values, strict=True)]


def get_reinforce_plus_plus_baseline_advantages(
    rewards: Sequence[float], kl: list[torch.Tensor], kl_coef: float
) -> list[torch.Tensor]:
    """Group-centred reward minus kl_coef * KL_t on every token."""
    return [float(reward) - kl_coef * k for reward, k in zip(rewards, kl, strict=True)]


def discounted_returns(rewards: torch.Tensor, gamma: float, lengths: Sequence[int] | None = None) -> torch.Tensor:
    """G_t = r_t + gamma * G_{t+1} along the last dimension, as a scan of log2(T) vector operations.

    Doubling: after pass n each entry holds the discounted sum of the 2^n rewards from its position on.

    Args:
        rewards: [..., T].
        lengths: the last dimension holds sequences of these lengths, one after the other, each with its own G.
    """
    out = rewards.clone()
    size = out.shape[-1]
    bounds = [size] if lengths is None else lengths
    if size == 0:
        return out
    lengths_N = torch.tensor(bounds, dtype=torch.int64, device=out.device)
    ends_T = lengths_N.cumsum(0).repeat_interleave(lengths_N, output_size=size)
    left_T = ends_T - torch.arange(size, device=out.device)
    shift, discount = 1, gamma
    while shift < max(bounds) and discount != 0:
        further = torch.where(left_T[:-shift] > shift, out[..., shift:], 0.0)
        out[..., :-shift] += discount * further
        shift, discount = 2 * shift, discount * discount
    return out


def _discounted_per_sample(rewards: list[torch.Tensor], gamma: float) -> list[torch.Tensor]:
    if not rewards:
        return []
    lengths = [len(r) for r in rewards]
    return list(discounted_returns(torch.cat(rewards), gamma, lengths).split(lengths))


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
