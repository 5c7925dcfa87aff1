"""Copies of device tensors in host memory: to free the device, and to hold other weights for the same module."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch


class HostCopy:
    """Values of device tensors in (pinned) host memory. The buffers are allocated once.

    Args:
        tensors: their storages, shared ones once, are what is copied.
        constant: the values never change, so they are saved once only.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], constant: bool = False):
        storages = {t.untyped_storage()._cdata: t for t in tensors}
        self.tensors = list(storages.values())
        self.sizes = [t.untyped_storage().nbytes() for t in self.tensors]
        self.constant = constant
        self.host: list[torch.Tensor] | None = None

    def save(self) -> None:
        """Device to host."""
        if self.constant and self.host is not None:
            return
        if self.host is None:
            pin = any(t.is_cuda for t in self.tensors)
            self.host = [torch.empty(size, dtype=torch.uint8, pin_memory=pin) for size in self.sizes]
        for host, tensor in zip(self.host, self.tensors, strict=True):
            host.copy_(_bytes(tensor), non_blocking=True)
        _settle(self.tensors)

    def load(self) -> None:
        """Host to device."""
        for host, tensor in zip(self.host, self.tensors, strict=True):
            _bytes(tensor).copy_(host, non_blocking=True)
        _settle(self.tensors)

    def release(self) -> None:
        """Save, then give the device memory back; every view of the tensors stays valid for `restore`."""
        self.save()
        self.drop()

    def drop(self) -> None:
        """Give the device memory back; what was saved last is what `restore` brings."""
        for tensor in self.tensors:
            tensor.untyped_storage().resize_(0)

    def restore(self) -> None:
        """Undo `release`."""
        for tensor, size in zip(self.tensors, self.sizes, strict=True):
            tensor.untyped_storage().resize_(size)
        self.load()


@contextmanager
def swapped(own: HostCopy, other: HostCopy) -> Iterator[None]:
    """Run with the values of `other` in the device tensors; `own` is saved before and put back after."""
    own.save()
    other.load()
    try:
        yield
    finally:
        own.load()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage as uint8, including padding that `tensor` itself does not show."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),))


def _settle(tensors: list[torch.Tensor]) -> None:
    if any(t.is_cuda for t in tensors):
        torch.cuda.synchronize()
