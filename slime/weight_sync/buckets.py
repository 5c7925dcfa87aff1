"""Cut a model's named full tensors into buckets that travel to the engines as one flat tensor each.

The plan depends on names, shapes and dtypes alone, so every trainer rank comes to the same buckets in the same order
without talking to the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Protocol

import torch


@dataclass(frozen=True)
class TensorSpec:
    """A full (unsharded) tensor as the engine will see it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Bucket:
    """Tensors of one dtype, one behind the other."""

    specs: tuple[TensorSpec, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.specs[0].dtype

    @property
    def numel(self) -> int:
        return sum(spec.numel for spec in self.specs)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The bucket's tensors as views of `flat` [numel]."""
        parts = torch.split(flat, [spec.numel for spec in self.specs])
        return [part.view(spec.shape) for part, spec in zip(parts, self.specs, strict=True)]

    def metadata(self) -> list[SimpleNamespace]:
        """Where each tensor lies in the flat tensor, in elements: the form that engines unpack."""
        out, start = [], 0
        for spec in self.specs:
            end = start + spec.numel
            out.append(
                SimpleNamespace(
                    name=spec.name,
                    shape=torch.Size(spec.shape),
                    dtype=spec.dtype,
                    start_idx=start,
                    end_idx=end,
                    numel=spec.numel,
                )
            )
            start = end
        return out


class WeightSource(Protocol):
    """A trainer's weights. Knows how they are sharded, so that nothing else here has to."""

    def tensor_specs(self) -> list[TensorSpec]:
        """All tensors to send, the same list in the same order on every rank."""
        ...

    def gather(self, specs: Sequence[TensorSpec], out: Sequence[torch.Tensor] | None) -> None:
        """Write the full tensors into `out`; collective over all trainer ranks.

        `out` has the specs' shapes and dtypes, on the transport's device. None on a rank that sends nothing: it
        takes part in the communication and keeps nothing.
        """
        ...


def plan_buckets(specs: Sequence[TensorSpec], max_bytes: int) -> list[Bucket]:
    """Fill buckets of at most `max_bytes` in the order given; a larger tensor gets a bucket of its own.

    Raises:
        ValueError: two tensors have the same name, or `max_bytes` is not positive.
    """
    if max_bytes <= 0:
        raise ValueError(f"--update-weight-buffer-size must be positive, got {max_bytes}")
    seen: set[str] = set()
    for spec in specs:
        if spec.name in seen:
            raise ValueError(f"weight {spec.name!r} occurs twice")
        seen.add(spec.name)

    buckets: list[Bucket] = []
    open_specs: dict[torch.dtype, list[TensorSpec]] = {}
    open_bytes: dict[torch.dtype, int] = {}
    for spec in specs:
        if spec.dtype in open_specs and open_bytes[spec.dtype] + spec.nbytes > max_bytes:
            buckets.append(Bucket(tuple(open_specs.pop(spec.dtype))))
        if spec.dtype not in open_specs:
            open_specs[spec.dtype], open_bytes[spec.dtype] = [], 0
        open_specs[spec.dtype].append(spec)
        open_bytes[spec.dtype] += spec.nbytes
    buckets += [Bucket(tuple(rest)) for rest in open_specs.values()]
    return buckets
