"""The model that on-policy distillation learns from, in the policy's layout of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from slime.backends.common.host_memory import HostCopy
from slime.backends.megatron_utils.forward import Forward


class Teacher:
    """On a GPU its weights are in host memory while it does not run.

    Args:
        chunks: of this rank, with the teacher's weights.
        forward: runs them.
    """

    def __init__(self, chunks: Sequence[nn.Module], forward: Forward, device: torch.device):
        self._forward = forward
        parameters = [p for chunk in chunks for p in chunk.requires_grad_(False).parameters()]
        self._host: HostCopy | None = None
        if device.type == "cuda":
            self._host = HostCopy((p.detach() for p in parameters), constant=True)
            self._host.release()
            torch.cuda.empty_cache()

    @contextmanager
    def on_device(self) -> Iterator[Forward]:
        """What runs it, ready to."""
        if self._host is None:
            yield self._forward
            return
        self._host.restore()
        try:
            yield self._forward
        finally:
            self._host.drop()
