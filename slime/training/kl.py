"""Estimators of KL(policy || reference) from log-probs of sampled tokens (http://joschu.net/blog/kl-approx.html)."""

from __future__ import annotations

import torch

KL_KINDS = ("k1", "k2", "k3", "low_var_kl")

MAX_EXPONENT = 80.0
"""exp of more is near the end of fp32, and of 89 infinite: what is clipped anyway must not have a gradient 0 * inf."""


def approx_kl(
    log_probs: torch.Tensor,
    ref_log_probs: torch.Tensor,
    kind: str,
    importance_ratio: torch.Tensor | None = None,
) -> torch.Tensor:
    """Per-token KL estimate, with x = log_probs - ref_log_probs in at least fp32.

    k1: x. k2: x^2 / 2. k3: exp(-x) - 1 + x. low_var_kl: k3 clamped to [-10, 10].

    Args:
        importance_ratio: policy / sampling policy; multiplies the estimate before the clamp, which makes its gradient
            unbiased off-policy (DeepSeek-V3.2). Gradient flows through it.

    Raises:
        ValueError: unknown `kind`.
    """
    x = log_probs.to(torch.promote_types(torch.float32, log_probs.dtype)) - ref_log_probs
    if kind == "k1":
        kl = x
    elif kind == "k2":
        kl = x.square() / 2
    elif kind == "k3":
        kl = torch.exp(-x) - 1 + x
    elif kind == "low_var_kl":
        kl = torch.exp((-x).clamp(max=MAX_EXPONENT)) - 1 + x
    else:
        raise ValueError(f"unknown KL estimator {kind!r}: choose one of {', '.join(KL_KINDS)}")
    if importance_ratio is not None:
        kl = importance_ratio * kl
    return kl.clamp(-10, 10) if kind == "low_var_kl" else kl
