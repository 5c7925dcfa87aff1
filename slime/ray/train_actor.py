"""What every trainer process is, whatever its backend: a rank of the trainers' world, in a Ray actor."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Sequence
from datetime import timedelta
from typing import Any


class TrainRayActor:
    """One trainer rank. A backend fills in sharding, forward / backward and the checkpoint format.

    Rank 0 is created without an address: it opens the store that the ranks meet at on a free port and holds it, so
    that runs beside each other cannot take it away. The others are created with what it answers to
    `get_master_addr_and_port`.
    """

    def __init__(self, world_size: int, rank: int, master_addr: str | None = None, master_port: int | None = None):
        self.world_size = world_size
        self.rank = rank
        self._store = None
        self._master = (master_addr, master_port)

    def redirect_logs(self, path: str, prefix: str) -> None:
        """Send this process's output to its own log file."""
        from slime.observability import stacks
        from slime.observability.run_dir import redirect_output
        from slime.utils.logging_utils import configure_logging

        redirect_output(path)
        configure_logging(prefix=prefix)
        stacks.dump_on_signal()

    def get_master_addr_and_port(self) -> tuple[str, int]:
        """Where rank 0's store listens (rank 0 only)."""
        import torch.distributed as dist

        if self._store is None:
            address = self.node_address()
            self._store = dist.TCPStore(address, 0, self.world_size, is_master=True, wait_for_workers=False)
            self._master = (address, self._store.port)
        return self._master

    def node_address(self) -> str:
        """Address of this node for the other processes of the run: the loopback when all are on one node."""
        import ray

        nodes = [node for node in ray.nodes() if node["Alive"]]
        return "127.0.0.1" if len(nodes) == 1 else ray.util.get_node_ip_address()

    def join_world(self, backend: str, timeout_minutes: float) -> None:
        """Set up torch.distributed over all trainer ranks. `nccl` adds gloo for what lives in host memory."""
        import torch.distributed as dist

        timeout = timedelta(minutes=timeout_minutes)
        if self._store is None:
            if self.rank == 0:
                self.get_master_addr_and_port()
            else:
                self._store = dist.TCPStore(*self._master, self.world_size, is_master=False, timeout=timeout)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if backend == "nccl" else backend,
            store=self._store,
            rank=self.rank,
            world_size=self.world_size,
            timeout=timeout,
        )

    def pid(self) -> int:
        return os.getpid()

    def init(self, args: Namespace, role: str, with_ref: bool = False) -> int:
        """Build model and optimizer, resume if there is a checkpoint; returns the first rollout id to run."""
        raise NotImplementedError

    def set_rollout_engines(self, urls: list[str], engine_slots: list[list[int]]) -> None:
        """Connect to the engines; collective. Called again when the set of engines changed.

        Args:
            urls: HTTP address of each engine.
            engine_slots: per engine the device slots it stands on; with colocation these are trainer ranks.
        """
        raise NotImplementedError

    def sync_new_engines(self, urls: list[str], engine_slots: list[list[int]]) -> None:
        """Give engines that were just started the weights that the others serve, or newer ones; collective.

        The others are left alone. `set_rollout_engines` with all of them follows before the next `update_weights`.
        """
        raise NotImplementedError

    def train(self, rollout_id: int, refs: list[Any], shared: Sequence[list[Any]] = ()) -> dict[str, float] | None:
        """Train on one rollout, of which `refs[dp_rank]` is this rank's part; rank 0 returns the metrics.

        Each of `shared` has a ref per rank to arrays per sample by key, which the other role computed for it.
        """
        raise NotImplementedError

    def update_weights(self) -> dict[str, float] | None:
        """Push the weights to the engines; rank 0 returns the metrics."""
        raise NotImplementedError

    def check_weights(self) -> None:
        """Prove that updates reach every weight of every engine (`--check-weight-update-equal`)."""
        raise NotImplementedError

    def save_model(self, rollout_id: int) -> dict[str, float] | None:
        """Write the checkpoint of `rollout_id`; rank 0 returns the metrics."""
        raise NotImplementedError

    def offload(self, keep_parameters: bool = False) -> dict[str, float] | None:
        """Give device memory to the engines; `keep_parameters`: what weights are sent from stays for now."""
        raise NotImplementedError

    def onload(self) -> dict[str, float] | None:
        """Take it back."""
        raise NotImplementedError

    def dispose(self) -> None:
        """Leave all process groups."""
        raise NotImplementedError
