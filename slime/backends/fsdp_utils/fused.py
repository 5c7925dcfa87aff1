"""Puts the fused norms, rotary embeddings and SwiGLU of `slime.modeling.triton_ops` into a model to train."""

from __future__ import annotations

from types import MethodType

import torch
from torch import nn

from slime.modeling.fuse import fuse, probe
from slime.modeling.triton_ops import RMSNorm, Rotary, SwiGLU


def fuse_for_training(model: nn.Module, swiglu: bool = True) -> None:
    """Use the kernels in `model` (on a GPU) where they compute what its own code computes.

    The engine has norms and rotary embeddings alike, but not SwiGLU: leave it out for equal bits.
    """
    with torch.no_grad():
        fuse(model, RMSNorm.apply, Rotary.apply)
        swiglus = [module for module in model.modules() if swiglu and _is_swiglu(module)]
    for module in swiglus:
        module.forward = MethodType(_swiglu_forward, module)


def _swiglu_forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return self.down_proj(SwiGLU.apply(self.gate_proj(x), self.up_proj(x)))


def _is_swiglu(module: nn.Module) -> bool:
    """The module is down(silu(gate(x)) * up(x)) of three linear layers and nothing else."""
    layers = dict(module.named_children())
    linear = [name for name, layer in layers.items() if isinstance(layer, nn.Linear)]
    if sorted(linear) != ["down_proj", "gate_proj", "up_proj"] or set(layers) - set(linear) > {"act_fn"}:
        return False
    weight = layers["gate_proj"].weight
    x = probe(weight, 3, weight.shape[1])
    expected = module(x)
    got = layers["down_proj"](nn.functional.silu(layers["gate_proj"](x)) * layers["up_proj"](x))
    return isinstance(expected, torch.Tensor) and torch.equal(expected, got)
