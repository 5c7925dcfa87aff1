"""Further weights beside the policy's: those that the engines were sent, and those of a teacher."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from slime.backends.fsdp_utils.host_memory import HostCopy
from slime.backends.fsdp_utils.model import PolicyModel, local_tensor

KEPT_VERSIONS = 2
"""An asynchronous loop trains on samples of the version before the one that the engines serve."""


class SentWeights:
    """The weights of the last versions that the engines were sent (`--keep-old-actor`).

    Args:
        trained: the parameters that change, in the model; copies of them are what is kept.
    """

    def __init__(self, trained: HostCopy):
        self._trained = trained
        self._versions: dict[int, tuple[HostCopy, int]] = {}

    def __bool__(self) -> bool:
        return bool(self._versions)

    def remember(self, version: int, steps_done: int) -> None:
        """Keep what the model holds now, after `steps_done` optimizer steps, as `version`."""
        if len(self._versions) == KEPT_VERSIONS:
            copy, _ = self._versions.pop(min(self._versions))
        else:
            copy = HostCopy(self._trained.tensors)
        copy.save()
        self._versions[version] = (copy, steps_done)

    def of_version(self, version: int, steps_done: int) -> HostCopy | None:
        """The newest kept weights that are not newer than `version`, else the oldest.

        None when those are what the model holds after `steps_done` steps.
        """
        known = [kept for kept in self._versions if kept <= version] or [min(self._versions)]
        copy, steps = self._versions[max(known)]
        return None if steps == steps_done else copy


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
