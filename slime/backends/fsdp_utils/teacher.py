"""The model that on-policy distillation learns from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from slime.backends.common.host_memory import HostCopy
from slime.backends.fsdp_utils.model import PolicyModel, local_tensor


class Teacher:
    """The model that on-policy distillation learns from. Its architecture may differ from the policy's.

    Args:
        model: with the teacher's weights on `device`.
        stays: it has its weights in host memory anyway, so nothing needs to be moved.
    """

    def __init__(self, model: PolicyModel, device: torch.device, stays: bool):
        self._model = model.requires_grad_(False)
        self._host: HostCopy | None = None
        if device.type == "cuda" and not stays:
            self._host = HostCopy((local_tensor(p) for p in model.parameters()), constant=True)
            self._host.release()
            torch.cuda.empty_cache()

    @contextmanager
    def on_device(self) -> Iterator[PolicyModel]:
        """The model, ready to run."""
        if self._host is None:
            yield self._model
            return
        self._host.restore()
        try:
            yield self._model
        finally:
            self._host.drop()
