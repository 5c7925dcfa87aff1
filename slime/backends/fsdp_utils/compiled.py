"""Decoder layers through `torch.compile` (`--fsdp-compile`).

Each layer is compiled by itself and all share one compiled graph per part, so compiling takes as long for 4 layers as
for 64. Attention stays the shared function, outside of the graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from slime.modeling.attention import ATTENTION_NAME, attention_forward


def compile_layers(layers: Iterable[nn.Module], backend: str) -> None:
    """Compile the layers' forward and backward, at their first call; their rows may differ in length."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, torch.compiler.disable(attention_forward))
    for layer in layers:
        layer.forward = CompiledForward(layer.forward, backend)


class CompiledForward:
    """A layer's forward, with the same bits whether or not gradients are wanted.

    A graph for inference alone could fuse and so round differently than one for training, and log-probs from before
    the first update would not be those of the update. So there is only the latter.
    """

    def __init__(self, forward: Callable[..., Any], backend: str):
        self.compiled = torch.compile(forward, backend=backend, dynamic=True)

    def __call__(self, hidden_BTD: torch.Tensor, *args, **kwargs) -> Any:
        if torch.is_grad_enabled():
            return self.compiled(hidden_BTD, *args, **kwargs)
        with torch.enable_grad():
            out = self.compiled(hidden_BTD.detach().requires_grad_(), *args, **kwargs)
        return out.detach()
