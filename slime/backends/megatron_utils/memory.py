"""What a Megatron rank gives back to the GPU between its turns, and how it takes it back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from slime.backends.common.host_memory import HostCopy
from slime.backends.megatron_utils.optimizer import Optimizer


class DeviceMemory:
    """Parameters and optimizer state move to pinned host memory and back; gradients are dropped. On CPU nothing moves.

    Args:
        chunks: model chunks wrapped for data parallelism.
        parameters: a host copy of the parameters' storages.
    """

    def __init__(self, chunks: Sequence[Any], optimizer: Optimizer, parameters: HostCopy, device: torch.device):
        self.chunks = chunks
        self.optimizer = optimizer
        self.parameters = parameters
        self.device = device
        self._rest: HostCopy | None = None
        self.rest_released = False
        self.parameters_released = False

    def offload(self, keep_parameters: bool = False) -> None:
        """`keep_parameters`: what weights are sent from stays for now."""
        if self.device.type == "cpu":
            return
        if not self.rest_released:
            own = {tensor.untyped_storage()._cdata for tensor in self.parameters.tensors}
            state = [t for t in self.optimizer.state_tensors() if t.is_cuda and t.untyped_storage()._cdata not in own]
            if self._rest is None or len(self._rest.tensors) != len({t.untyped_storage()._cdata for t in state}):
                self._rest = HostCopy(state)
            self._rest.release()
            for gradients in self._gradients():
                gradients.untyped_storage().resize_(0)
            self.rest_released = True
        if not keep_parameters and not self.parameters_released:
            self.parameters.release()
            self.parameters_released = True
        torch.cuda.empty_cache()

    def onload(self) -> None:
        if self.parameters_released:
            self.parameters.restore()
            self.parameters_released = False
        if self.rest_released:
            self._rest.restore()
            for gradients in self._gradients():
                gradients.untyped_storage().resize_(gradients.numel() * gradients.element_size())
                gradients.zero_()
            self.rest_released = False

    def with_parameters(self, action: Callable[[], Any]) -> Any:
        """Run what only reads the parameters with them on the device, even while they are offloaded."""
        if not self.parameters_released:
            return action()
        self.parameters.restore()
        try:
            return action()
        finally:
            self.parameters.drop()
            torch.cuda.empty_cache()

    def _gradients(self) -> list[torch.Tensor]:
        buffers = [buffer for chunk in self.chunks for buffer in chunk.buffers + chunk.expert_parallel_buffers]
        return [buffer.grad_data for buffer in buffers]
