"""Weights to engines on other devices or machines: several trainer ranks broadcast each bucket, each to its engines.

All ranks gather a bucket together, so every rank could send it. As many do as there are engines, if there are so many
ranks: each has a process group of its own with its share of the engines. An engine that is slow or lost holds up its
own group alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from datetime import timedelta
from urllib.parse import urlsplit
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from slime.weight_sync.buckets import Bucket
from slime.weight_sync.engines import Engines, WeightSyncError
from slime.weight_sync.failures import error_of, raise_on_all_ranks

FORMATION_TIMEOUT = timedelta(seconds=60)
REPLY_PATIENCE_SECS = 10.0


def share_engines(trainer_hosts: Sequence[str], engine_hosts: Sequence[str | None]) -> dict[int, list[int]]:
    """The engines that each sending rank sends to, by rank.

    Senders are spread evenly over the ranks, hence over the nodes. An engine goes to a sender on its own node as long
    as none gets more than an equal share (rounded up) that way.
    """
    count = min(len(trainer_hosts), len(engine_hosts))
    shares: dict[int, list[int]] = {i * len(trainer_hosts) // count: [] for i in range(count)}
    limit = -(-len(engine_hosts) // max(1, count))
    far = []
    for engine, host in enumerate(engine_hosts):
        near = [share for rank, share in shares.items() if trainer_hosts[rank] == host and len(share) < limit]
        if near:
            min(near, key=len).append(engine)
        else:
            far.append(engine)
    for engine in far:
        min(shares.values(), key=len).append(engine)
    return {rank: share for rank, share in shares.items() if share}


class DistributedTransport:
    """Sends from the ranks that `share_engines` chose; the others only help to gather. Collective.

    Args:
        engines: all engines.
        engine_sizes: ranks (devices) of each engine.
        rank: this trainer rank.
        device: where the bucket lives.
        backend: "gloo" or "nccl".
        address: of this rank's node, for the engines.
        group_name: what the names of the groups start with.
        timeout: seconds for a group's formation and each broadcast.

    Raises:
        WeightSyncError: an engine did not join; raised on every rank, and no group is left.
    """

    def __init__(
        self,
        engines: Engines,
        engine_sizes: Sequence[int],
        rank: int,
        device: torch.device,
        backend: str,
        address: str,
        group_name: str,
        timeout: float = 600.0,
    ):
        self.device = device
        hosts: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(hosts, address)
        share = share_engines(hosts, [urlsplit(url).hostname for url in engines.urls]).get(rank, [])
        self.sends = bool(share)
        self._group: UpdateGroup | None = None
        failure = None
        if share:
            own = Engines([engines.urls[i] for i in share])
            self._group = UpdateGroup(own, [engine_sizes[i] for i in share], group_name)
            failure = error_of(lambda: self._group.form(backend, address, timedelta(seconds=timeout)))
        try:
            raise_on_all_ranks(failure)
        except WeightSyncError:
            self.close()
            raise

    def allocate(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def send(self, bucket: Bucket, flat: torch.Tensor, weight_version: str) -> None:
        """Broadcast the filled bucket to this rank's engines; returns when they have loaded it.

        Raises:
            WeightSyncError: an engine refused it or is lost. The group is broken then.
        """
        payload = {
            "names": [spec.name for spec in bucket.specs],
            "dtypes": [str(spec.dtype).removeprefix("torch.") for spec in bucket.specs],
            "shapes": [list(spec.shape) for spec in bucket.specs],
            "load_format": "flattened_bucket",
            "flush_cache": False,
            "weight_version": weight_version,
        }
        self._group.broadcast(flat.view(torch.uint8), payload)

    def collect(self) -> None:
        """Nothing was exported: the memory goes back by itself."""

    def close(self) -> None:
        """Leave the group, the engines too."""
        if self._group is not None:
            self._group.close()
            self._group = None


class UpdateGroup:
    """A process group of this trainer rank, which is 0 in it, and the ranks of some engines.

    It stands beside the trainer's own world and is made as SGLang makes its side (same store prefix and group name),
    so both meet.

    Args:
        engines: its engines.
        engine_sizes: ranks of each.
        name: what the group's name starts with. Engines may still be in the group of a trainer that was lost.
    """

    def __init__(self, engines: Engines, engine_sizes: Sequence[int], name: str):
        self.engines = engines
        self.engine_sizes = list(engine_sizes)
        self.name = f"{name}-{uuid4().hex[:8]}"
        self._group: dist.ProcessGroup | None = None
        self._waiter = ThreadPoolExecutor(1, thread_name_prefix="weight-broadcast")

    def form(self, backend: str, address: str, timeout: timedelta) -> None:
        """Wait until all engines have joined. The group's store is served at `address`, on a free port.

        Raises:
            WeightSyncError: one did not.
        """
        world_size = 1 + sum(self.engine_sizes)
        # Short: an engine that died meanwhile never comes, and the others wait for it as long as the store is there.
        formation = min(timeout, FORMATION_TIMEOUT)
        store = dist.TCPStore(address, 0, world_size, is_master=True, timeout=formation, wait_for_workers=False)
        common = {"master_address": address, "master_port": store.port, "backend": backend}
        common |= {"world_size": world_size, "group_name": self.name}
        joins, offset = [], 1
        for index, size in enumerate(self.engine_sizes):
            joins.append(self.engines.start(index, "/init_weights_update_group", common | {"rank_offset": offset}))
            offset += size
        join = self._waiter.submit(_join, store, world_size, self.name, backend, formation)
        del store
        self._group = _first_error_or(joins, join)
        c10d._set_pg_timeout(timeout, self._group)

    def broadcast(self, data: torch.Tensor, payload: dict[str, object]) -> None:
        """Announce `data` to the engines and send it; returns when all have answered.

        Raises:
            WeightSyncError: one refused or is lost; the others do not wait for the rest.
        """
        payload = payload | {"group_name": self.name}
        replies = [
            self.engines.start(i, "/update_weights_from_distributed", payload) for i in range(len(self.engines))
        ]
        stream = torch.cuda.current_stream() if data.is_cuda else None
        try:
            _first_error_or(replies, self._waiter.submit(self._broadcast, data, stream))
        except WeightSyncError:
            self._group.abort()
            raise

    def _broadcast(self, data: torch.Tensor, stream: torch.cuda.Stream | None) -> None:
        with torch.cuda.stream(stream):
            dist.broadcast(data, src=0, group=self._group)
        if stream is not None:
            stream.synchronize()

    def close(self) -> None:
        """Leave, the engines too. An engine that is gone has left already."""
        if self._group is not None:
            error_of(lambda: self.engines.call("/destroy_weights_update_group", {"group_name": self.name}))
            dist.destroy_process_group(self._group)
            self._group = None
        self._waiter.shutdown(wait=False)
        self.engines.close()


def _join(store: dist.Store, world_size: int, name: str, backend: str, timeout: timedelta) -> dist.ProcessGroup:
    """Rank 0 of a process group independent of the default one; returns when all members have joined.

    torch has no public constructor for a group with processes outside the default world, hence the helper that
    `init_process_group` itself is made of.
    """
    group, _ = c10d._new_process_group_helper(
        world_size, 0, [], c10d.Backend(backend), dist.PrefixStore(name, store), group_name=name, timeout=timeout
    )
    c10d._world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    return group


def _first_error_or(replies: list[Future], work: Future):
    """Result of `work` once all replies are in; an engine's error ends the wait at once, since `work` then hangs.

    Raises:
        WeightSyncError: of the engine that failed. A collective may notice a lost engine before the engine's reply
            fails, so that is waited for.
    """
    wait([work, *replies], return_when=FIRST_EXCEPTION)
    if work.done() and work.exception() is not None:
        wait(replies, timeout=REPLY_PATIENCE_SECS, return_when=FIRST_EXCEPTION)
    for reply in replies:
        if reply.done():
            reply.result()
    try:
        return work.result()
    except RuntimeError as error:
        raise WeightSyncError(f"the engines' process group failed: {error}") from error
