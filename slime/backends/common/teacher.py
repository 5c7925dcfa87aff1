"""The model that on-policy distillation learns from, of whatever backend."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

import torch

from slime.backends.common.host_memory import HostCopy

Runner = TypeVar("Runner")


class Teacher(Generic[Runner]):
    """A model that is not trained, whose architecture may differ from the policy's.

    Args:
        runs: what runs it, on loan by `on_device`.
        parameters: this rank's. Those on a GPU are in host memory while the model does not run.
    """

    def __init__(self, runs: Runner, parameters: Iterable[torch.Tensor]):
        self._runs = runs
        on_gpu = [p.detach() for p in parameters if p.is_cuda]
        self._host = HostCopy(on_gpu, constant=True) if on_gpu else None
        if self._host is not None:
            self._host.release()
            torch.cuda.empty_cache()

    @contextmanager
    def on_device(self) -> Iterator[Runner]:
        """What runs it, ready to."""
        if self._host is None:
            yield self._runs
            return
        self._host.restore()
        try:
            yield self._runs
        finally:
            self._host.drop()
