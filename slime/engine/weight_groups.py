"""Process groups in which a trainer (rank 0) broadcasts weights to engines.

They are made as SGLang makes them (rendezvous on the given address, store and group prefixed with the group's name),
so one trainer speaks to both.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _new_process_group_helper, _world

from slime.engine.payload import LOAD_FORMATS, parse_dtype
from slime.engine.protocol import RequestError
from slime.engine.weights import WeightStore

TIMEOUT = timedelta(minutes=10)


def join_group(
    address: str, port: int, rank: int, world_size: int, name: str, backend: str, timeout: timedelta = TIMEOUT
) -> dist.ProcessGroup:
    """A process group of its own, apart from the default group."""
    rendezvous = dist.rendezvous(f"tcp://{address}:{port}", rank, world_size, timeout=timeout)
    store, rank, world_size = next(rendezvous)
    store.set_timeout(timeout)
    group, _ = _new_process_group_helper(
        world_size, rank, [], backend, dist.PrefixStore(name, store), group_name=name, timeout=timeout
    )
    _world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    return group


class WeightGroups:
    """The groups this engine is in, by name."""

    def __init__(self, device: torch.device):
        self.device = device
        self.groups: dict[str, dist.ProcessGroup] = {}

    def init(self, body: dict[str, Any]) -> None:
        """Join the group of /init_weights_update_group.

        Raises:
            RequestError: a missing field, a name in use, or nobody answers.
        """
        name = body.get("group_name", "weight_update_group")
        backend = body.get("backend", "nccl")
        try:
            address, port = str(body["master_address"]), int(body["master_port"])
            rank, world_size = int(body["rank_offset"]), int(body["world_size"])
        except (KeyError, TypeError, ValueError) as error:
            raise RequestError(f"missing or bad field: {error}") from error
        if name in self.groups:
            raise RequestError(f"the group {name!r} exists already")
        if not 0 < rank < world_size:
            raise RequestError(f"rank_offset {rank} must be in [1, world_size {world_size})")
        if backend not in ("gloo", "nccl") or (backend == "nccl" and self.device.type != "cuda"):
            raise RequestError(f"backend {backend!r} does not work for an engine on {self.device.type}")
        try:
            self.groups[name] = join_group(address, port, rank, world_size, name, backend)
        except (RuntimeError, ValueError) as error:
            raise RequestError(f"cannot join group {name!r} at {address}:{port}: {error}") from error

    def destroy(self, name: Any) -> None:
        if name not in self.groups:
            raise RequestError(f"there is no group {name!r}")
        dist.destroy_process_group(self.groups.pop(name))

    def receive(self, body: dict[str, Any], store: WeightStore) -> None:
        """Receive what /update_weights_from_distributed announces, then load it. Blocks until the trainer sent all.

        Raises:
            RequestError: lists that do not match, an unknown weight or format (found before the first broadcast), or
                a trainer that went away.
        """
        group = self.groups.get(body.get("group_name", "weight_update_group"))
        if group is None:
            raise RequestError(f"there is no group {body.get('group_name')!r}: POST /init_weights_update_group first")
        load_format = body.get("load_format")
        if load_format not in LOAD_FORMATS:
            raise RequestError(f"load_format {load_format!r} is not supported; use flattened_bucket or none")
        names, dtypes, shapes = body.get("names"), body.get("dtypes"), body.get("shapes")
        if not all(isinstance(x, list) for x in (names, dtypes, shapes)) or not len(names) == len(dtypes) == len(
            shapes
        ):
            raise RequestError("names, dtypes and shapes must be lists of one length")
        if not all(isinstance(shape, list) and all(type(n) is int for n in shape) for shape in shapes):
            raise RequestError("shapes must be lists of integers")
        shapes = [torch.Size(shape) for shape in shapes]
        for name, shape in zip(names, shapes, strict=True):
            store.check_fits(name, shape)
        # gloo moves host memory.
        device = self.device if dist.get_backend(group) == "nccl" else torch.device("cpu")
        messages, tensors = _memory(shapes, [parse_dtype(dtype) for dtype in dtypes], load_format, device)
        try:
            handles = [dist.broadcast(message, src=0, group=group, async_op=True) for message in messages]
            for handle in handles:
                handle.wait()
        except RuntimeError as error:
            raise RequestError(f"the broadcast failed, the old weights stay: {error}", status=500) from error
        store.load(list(zip(names, tensors, strict=True)))


def _memory(
    shapes: Sequence[torch.Size], dtypes: Sequence[torch.dtype], load_format: str | None, device: torch.device
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What to broadcast into, and the tensors in it: of a flattened bucket all bytes at once, else each by itself."""
    if load_format is None:
        tensors = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in zip(shapes, dtypes, strict=True)]
        return tensors, tensors
    if not shapes:
        raise RequestError("a flattened bucket must hold a tensor")
    sizes = [shape.numel() * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)]
    flat, tensors, start = torch.empty(sum(sizes), dtype=torch.uint8, device=device), [], 0
    for shape, dtype, size in zip(shapes, dtypes, sizes, strict=True):
        if start % dtype.itemsize:
            raise RequestError(f"a bucket cannot hold {dtype} from byte {start} on")
        tensors.append(flat[start : start + size].view(dtype).view(shape))
        start += size
    return [flat], tensors
