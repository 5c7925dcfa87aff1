"""What an FSDP rank gives back to the GPU between its turns, and how it takes it back."""

from __future__ import annotations

from slime.backends.common.device_memory import DeviceMemory
from slime.backends.common.host_memory import HostCopy
from slime.backends.fsdp_utils.model import PolicyModel, local_tensor
from slime.backends.fsdp_utils.optimizer import Optimizer


class FSDPMemory(DeviceMemory):
    """Beside the parameters the optimizer's moments; gradients are gone after each step.

    Args:
        trained: a host copy of the parameters that training changes.
    """

    def __init__(self, model: PolicyModel, optimizer: Optimizer, trained: HostCopy, stays: bool):
        frozen = HostCopy((local_tensor(p) for p in model.parameters() if not p.requires_grad), constant=True)
        super().__init__([trained, frozen], stays)
        self._model = model
        self._optimizer = optimizer
        self._moments: HostCopy | None = None

    def _release_rest(self) -> None:
        if self._moments is None and self._optimizer.adam.state:
            self._moments = HostCopy(self._optimizer.local_tensors())
        self._model.free_unsharded()
        if self._moments is not None:
            self._moments.release()

    def _restore_rest(self) -> None:
        if self._moments is not None:
            self._moments.restore()
