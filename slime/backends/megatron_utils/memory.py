"""What a Megatron rank gives back to the GPU between its turns, and how it takes it back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from slime.backends.common.device_memory import DeviceMemory
from slime.backends.common.host_memory import HostCopy
from slime.backends.megatron_utils.groups import ReleasableGroups
from slime.backends.megatron_utils.optimizer import Optimizer


class MegatronMemory(DeviceMemory):
    """Beside the parameters the optimizer's state; gradient buffers are dropped.

    Args:
        chunks: model chunks wrapped for data parallelism.
        parameters: a host copy of the parameters' storages.
        groups: between whose members they are cut.
    """

    def __init__(
        self,
        chunks: Sequence[Any],
        optimizer: Optimizer,
        parameters: HostCopy,
        groups: ReleasableGroups,
        stays: bool,
    ):
        super().__init__([parameters], stays)
        self._groups = groups
        self._chunks = chunks
        self._optimizer = optimizer
        self._own = {tensor.untyped_storage()._cdata for tensor in parameters.tensors}
        self._rest: HostCopy | None = None

    def _release_rest(self) -> None:
        state = [t for t in self._optimizer.state_tensors() if t.is_cuda and self._storage(t) not in self._own]
        if self._rest is None or len(self._rest.tensors) != len({self._storage(t) for t in state}):
            self._rest = HostCopy(state)
        self._rest.release()
        for gradients in self._gradients():
            gradients.untyped_storage().resize_(0)

    def _restore_rest(self) -> None:
        self._rest.restore()
        for gradients in self._gradients():
            gradients.untyped_storage().resize_(gradients.numel() * gradients.element_size())
            gradients.zero_()

    def _leave_groups(self) -> None:
        self._groups.release()

    def _join_groups(self) -> None:
        self._groups.join()

    @staticmethod
    def _storage(tensor: torch.Tensor) -> int:
        return tensor.untyped_storage()._cdata

    def _gradients(self) -> list[torch.Tensor]:
        buffers = [buffer for chunk in self._chunks for buffer in chunk.buffers + chunk.expert_parallel_buffers]
        return [buffer.grad_data for buffer in buffers]
