"""Weights to engines on other devices or machines: trainer rank 0 broadcasts each bucket to all engine ranks.

The process group stands beside the trainer's own world: rank 0 is the trainer, the engines' ranks follow. It is made
the way SGLang makes its side (same store prefix and group name), so both meet.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from datetime import timedelta
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from slime.weight_sync.buckets import Bucket
from slime.weight_sync.engines import Engines, WeightSyncError
from slime.weight_sync.failures import error_of

FORMATION_TIMEOUT = timedelta(seconds=60)
REPLY_PATIENCE_SECS = 10.0


def join_update_group(
    store: dist.Store, rank: int, world_size: int, group_name: str, backend: str, timeout: timedelta
) -> dist.ProcessGroup:
    """A process group independent of the default one; returns when all `world_size` members have joined.

    torch has no public constructor for a group with processes outside the default world, hence the helper that
    `init_process_group` itself is made of.
    """
    group, _ = c10d._new_process_group_helper(
        world_size,
        rank,
        [],
        c10d.Backend(backend),
        dist.PrefixStore(group_name, store),
        group_name=group_name,
        timeout=timeout,
    )
    c10d._world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    return group


class DistributedTransport:
    """Rank 0 broadcasts; the other trainer ranks only help to gather.

    Args:
        engines: all engines.
        engine_sizes: ranks (devices) of each engine.
        rank: this trainer rank.
        device: where the bucket lives.
        backend: "gloo" or "nccl".
        master_address: address of rank 0, which serves the group's store there on a free port.
        group_name: what the group's name starts with.
        timeout: seconds for the group's formation and each broadcast.
    """

    def __init__(
        self,
        engines: Engines,
        engine_sizes: Sequence[int],
        rank: int,
        device: torch.device,
        backend: str,
        master_address: str,
        group_name: str,
        timeout: float = 600.0,
    ):
        self.engines = engines
        self.sends = rank == 0
        # Engines may still be in the group of a trainer that was lost.
        self.group_name = f"{group_name}-{uuid4().hex[:8]}"
        self.group: dist.ProcessGroup | None = None
        self._failed = False
        if not self.sends:
            return
        self.device = device
        self._waiter = ThreadPoolExecutor(1, thread_name_prefix="weight-broadcast")
        world_size = 1 + sum(engine_sizes)
        limit = timedelta(seconds=timeout)
        # Short: an engine that died meanwhile never comes, and the others wait for it as long as the store is there.
        formation = min(limit, FORMATION_TIMEOUT)
        store = dist.TCPStore(master_address, 0, world_size, is_master=True, timeout=formation, wait_for_workers=False)
        address = {"master_address": master_address, "master_port": store.port, "backend": backend}
        joins, offset = [], 1
        for index, size in enumerate(engine_sizes):
            payload = {**address, "rank_offset": offset, "world_size": world_size, "group_name": self.group_name}
            joins.append(engines.start(index, "/init_weights_update_group", payload))
            offset += size
        join = self._waiter.submit(join_update_group, store, 0, world_size, self.group_name, backend, formation)
        del store
        self.group = _first_error_or(joins, join)
        c10d._set_pg_timeout(limit, self.group)

    def allocate(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def send(self, bucket: Bucket, flat: torch.Tensor, weight_version: str) -> None:
        """Broadcast the filled bucket; returns when every engine has loaded it.

        Raises:
            WeightSyncError: an engine refused it (the broadcast it did not join is left behind).
        """
        payload = {
            "names": [spec.name for spec in bucket.specs],
            "dtypes": [str(spec.dtype).removeprefix("torch.") for spec in bucket.specs],
            "shapes": [list(spec.shape) for spec in bucket.specs],
            "group_name": self.group_name,
            "flush_cache": False,
            "weight_version": weight_version,
        }
        replies = [
            self.engines.start(i, "/update_weights_from_distributed", payload) for i in range(len(self.engines))
        ]
        self._failed = True
        stream = torch.cuda.current_stream() if flat.is_cuda else None
        _first_error_or(replies, self._waiter.submit(self._broadcast, bucket.views(flat), stream))
        self._failed = False

    def _broadcast(self, tensors: list[torch.Tensor], stream: torch.cuda.Stream | None) -> None:
        with torch.cuda.stream(stream):
            works = [dist.broadcast(tensor, src=0, group=self.group, async_op=True) for tensor in tensors]
            for work in works:
                work.wait()
        if stream is not None:
            stream.synchronize()

    def collect(self) -> None:
        """Nothing was exported: the memory goes back by itself."""

    def close(self) -> None:
        """Leave the group, the engines too."""
        if self.group is not None:
            if self._failed:
                self.group.abort()  # engines that wait for the rest of a broadcast learn that it will not come
            # An engine that is gone has left the group already.
            error_of(lambda: self.engines.call("/destroy_weights_update_group", {"group_name": self.group_name}))
            dist.destroy_process_group(self.group)
            self.group = None
            self._waiter.shutdown(wait=False)


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
