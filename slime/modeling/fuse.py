"""Puts fused norms and rotary embeddings into a Hugging Face model.

transformers computes them in a dozen small operations per layer. A module is changed only if the replacement gives
what its own code gives, and only in this model: other models of the class stay as they are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import FunctionType, MethodType

import torch

logger = logging.getLogger(__name__)

ROPE = "apply_rotary_pos_emb"


@torch.inference_mode()
def fuse(model: torch.nn.Module, norm: Callable, rope: Callable) -> tuple[int, int]:
    """Use the replacements in `model` where they apply; returns how many norms and attention modules changed.

    Args:
        norm: (x, weight, eps) -> x / rms(x) * weight over the last dimension.
        rope: (q [1, H, T, D], k [1, G, T, D], cos [1, T, D], sin [1, T, D]) -> q and k rotated.
    """
    norms = attentions = 0
    fused_rope: dict[Callable, Callable | None] = {}
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm") and _same_norm(module, norm):
            module.forward = MethodType(_norm_forward(norm), module)
            norms += 1
        forward = type(module).forward
        if isinstance(forward, FunctionType) and ROPE in forward.__code__.co_names:
            original = forward.__globals__.get(ROPE)
            if original not in fused_rope:
                fused_rope[original] = _rope_for(original, module, rope)
            if fused_rope[original] is not None:
                # The same code with another function behind the name.
                scope = {**forward.__globals__, ROPE: fused_rope[original]}
                copy = FunctionType(
                    forward.__code__, scope, forward.__name__, forward.__defaults__, forward.__closure__
                )
                copy.__kwdefaults__ = forward.__kwdefaults__
                module.forward = MethodType(copy, module)
                attentions += 1
    logger.debug("fused %d norms and the rotary embeddings of %d attention modules", norms, attentions)
    return norms, attentions


def _norm_forward(norm: Callable) -> Callable:
    def forward(self: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return norm(x, self.weight, self.variance_epsilon)

    return forward


def _same_norm(module: torch.nn.Module, norm: Callable) -> bool:
    """The module is x / rms(x) * weight (others scale by 1 + weight, or gate)."""
    weight = module._parameters.get("weight")
    if weight is None or weight.ndim != 1 or not isinstance(getattr(module, "variance_epsilon", None), float):
        return False
    if type(module).forward.__code__.co_argcount != 2:
        return False
    x = probe(weight, 3, len(weight))
    expected, got = module(x), norm(x, weight, module.variance_epsilon)
    rtol = 1e-5 if got.dtype == torch.float32 else 2e-2
    return got.dtype == expected.dtype and torch.allclose(got.float(), expected.float(), rtol=rtol, atol=1e-6)


def _rope_for(original: Callable, module: torch.nn.Module, rope: Callable) -> Callable | None:
    """`original` with the kernel where the shapes allow it; None when it computes something else."""
    weight = next(module.parameters(), None)
    if weight is None:
        return None
    dim = 32
    q, k = (probe(weight, 1, heads, 5, dim) for heads in (4, 2))
    cos, sin = (probe(weight, 1, 5, dim) for _ in range(2))
    try:
        expected = original(q, k, cos, sin)
    except (TypeError, ValueError, RuntimeError):  # takes other arguments
        return None
    if len(expected) != 2 or not all(map(_alike, expected, rope(q, k, cos, sin))):
        return None

    def apply(q, k, cos, sin, *args, **kwargs):
        plain = not args and not kwargs and q.ndim == 4 and cos.ndim == 3 and len(q) == len(k) == len(cos) == 1
        plain = plain and q.shape[-1] == k.shape[-1] == cos.shape[-1] == sin.shape[-1]
        plain = plain and q.stride(-1) == k.stride(-1) == 1 and q.dtype == k.dtype == cos.dtype == sin.dtype
        return rope(q, k, cos, sin) if plain else original(q, k, cos, sin, *args, **kwargs)

    return apply


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """The same bits; in float32 the last may differ, as products and sums may be one operation."""
    return torch.allclose(a, b, rtol=1e-5, atol=1e-6) if a.dtype == torch.float32 else torch.equal(a, b)


def probe(like: torch.Tensor, *shape: int) -> torch.Tensor:
    """Random numbers, the same for the same shape."""
    generator = torch.Generator(like.device).manual_seed(len(shape) + shape[-1])
    return torch.randn(shape, generator=generator, device=like.device).to(like.dtype)
