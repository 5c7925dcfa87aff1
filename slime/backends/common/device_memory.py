"""What a rank gives back to the GPU between its turns, and how it takes it back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from slime.backends.common.host_memory import HostCopy


class DeviceMemory:
    """Parameters and the rest (optimizer state, gradients: the backend's part) move to pinned host memory and back.

    Args:
        parameters: host copies that hold all parameters together.
        stays: nothing moves, because the run is on CPU or what it has is in host memory anyway.
    """

    def __init__(self, parameters: Sequence[HostCopy], stays: bool):
        self._parameters = parameters
        self._stays = stays
        self.rest_released = False
        self.parameters_released = False

    def _release_rest(self) -> None:
        raise NotImplementedError

    def _restore_rest(self) -> None:
        raise NotImplementedError

    def _leave_groups(self) -> None:
        """Give back what communication between ranks keeps; it is taken again with its next use."""

    def _join_groups(self) -> None:
        """Take it back."""

    def offload(self, keep_parameters: bool = False) -> None:
        """`keep_parameters`: what weights are sent from stays for now."""
        if self._stays:
            return
        if not self.rest_released:
            self._release_rest()
            self.rest_released = True
        if not keep_parameters and not self.parameters_released:
            for copy in self._parameters:
                copy.release()
            self.parameters_released = True
        torch.cuda.empty_cache()
        if self.parameters_released:
            self._leave_groups()

    def onload(self) -> None:
        self._join_groups()
        if self.parameters_released:
            self._restore_parameters()
            self.parameters_released = False
        if self.rest_released:
            self._restore_rest()
            self.rest_released = False

    def with_parameters(self, action: Callable[[], Any]) -> Any:
        """Run what only reads the parameters with them on the device, even while they are offloaded."""
        if not self.parameters_released:
            return action()
        self._restore_parameters()
        try:
            return action()
        finally:
            for copy in self._parameters:
                copy.drop()
            torch.cuda.empty_cache()
            self._leave_groups()

    def _restore_parameters(self) -> None:
        for copy in self._parameters:
            copy.restore()
