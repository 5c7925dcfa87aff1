"""Process groups that can be left and joined again while those who hold them notice nothing.

NCCL keeps buffers on the GPU for every group that was used. Megatron makes a dozen groups and keeps them in modules,
gradient buffers and optimizers, so between a trainer's turns the object has to stay while what is behind it goes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

_numbers = itertools.count()
"""Of the groups of this process; ranks make them in the same order, so that a number means the same on all."""


class ReleasableGroup(dist.ProcessGroup):
    """Stands for the process group `joined`, which is made when it is first asked for and again after `release`.

    Args:
        name: unlike that of any other group of the world, and the same on all members.
        ranks: its members, of whom this process is one.
        backend: as for `torch.distributed.new_group`, as are `timeout`, `options` and `description`.
    """

    def __init__(
        self, name: str, ranks: list[int], backend: str, timeout: timedelta, options: Any, description: str | None
    ):
        super().__init__(ranks.index(dist.get_rank()), len(ranks))
        self._name, self._ranks, self._backend = name, ranks, backend
        self._options = {"timeout": timeout, "backend_options": options, "group_desc": description}
        self._joined: dist.ProcessGroup | None = None
        self._times_joined = 0
        c10d._world.pg_group_ranks[self] = self._ranks_in_group()

    @property
    def joined(self) -> dist.ProcessGroup:
        """The group itself; with gloo a collective call for its members if they have to join."""
        if self._joined is None:
            backend, world, store = c10d.Backend(self._backend), c10d._world, c10d._get_default_store()
            # `new_group` would wait for the whole world each time, and its names would repeat.
            self._joined, _ = c10d._new_process_group_helper(
                len(self._ranks),
                self.rank(),
                self._ranks,
                backend,
                store,
                group_name=f"{self._name}-{self._times_joined}",
                **self._options,
            )
            self._times_joined += 1
            world.pg_group_ranks[self._joined] = self._ranks_in_group()
            world.pg_map[self] = (backend, store)
            world.pg_backend_config[self] = str(c10d.BackendConfig(backend))
        return self._joined

    def release(self) -> None:
        """Leave, with all that the backend holds on the device; collective, after all work of the group is done."""
        if self._joined is not None:
            dist.destroy_process_group(self._joined)
            self._joined = None
            # torch goes through all groups, and must not make one on the way.
            del c10d._world.pg_map[self], c10d._world.pg_backend_config[self]

    def _ranks_in_group(self) -> dict[int, int]:
        return {rank: index for index, rank in enumerate(self._ranks)}


def _forward(name: str) -> Any:
    if isinstance(getattr(dist.ProcessGroup, name), property):
        return property(lambda self: getattr(self.joined, name))
    return lambda self, *args, **kwargs: getattr(self.joined, name)(*args, **kwargs)


for _name, _attribute in vars(dist.ProcessGroup).items():
    _is_member = isinstance(_attribute, property) or type(_attribute).__name__ == "instancemethod"
    if _is_member and not _name.startswith(("__", "_pybind11")) and _name not in ("rank", "size"):
        setattr(ReleasableGroup, _name, _forward(_name))


class ReleasableGroups:
    """The groups of a model's parallelism, made inside `making`."""

    def __init__(self) -> None:
        self.groups: list[ReleasableGroup] = []

    @contextmanager
    def making(self) -> Iterator[None]:
        """`torch.distributed.new_group` makes releasable groups; without the wait for ranks that are no members."""
        new_group = dist.new_group
        dist.new_group = self._new_group
        dist.batch_isend_irecv = _batch_isend_irecv
        try:
            yield
        finally:
            dist.new_group = new_group
        self.join()

    def join(self) -> None:
        """Join all that were left, in the same order on all ranks."""
        for group in self.groups:
            group.joined  # noqa: B018

    def release(self) -> None:
        """Leave all; collective, and after another collective call since `join`: gloo joins until all have."""
        for group in self.groups:
            group.release()

    def _new_group(
        self,
        ranks: list[int],
        timeout: timedelta | None = None,
        backend: str | None = None,
        pg_options: Any = None,
        use_local_synchronization: bool = False,
        group_desc: str | None = None,
    ) -> dist.ProcessGroup | object:
        name = f"releasable-{next(_numbers)}"
        if dist.get_rank() not in ranks:
            return dist.GroupMember.NON_GROUP_MEMBER
        backend = backend or c10d._world.pg_map[c10d._get_default_group()][0]
        timeout = timeout or c10d._get_default_timeout(c10d.Backend(backend))
        self.groups.append(ReleasableGroup(name, sorted(ranks), backend, timeout, pg_options, group_desc))
        return self.groups[-1]


def _batch_isend_irecv(operations: list[dist.P2POp]) -> list[dist.Work]:
    """Give torch the groups themselves: it batches for its own class alone, and one by one NCCL would wait forever."""
    for operation in operations:
        if isinstance(operation.group, ReleasableGroup):
            operation.group = operation.group.joined
    return c10d.batch_isend_irecv(operations)
