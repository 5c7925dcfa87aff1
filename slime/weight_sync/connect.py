"""From the arguments to the way on which a trainer's weights reach its engines."""

from __future__ import annotations

from argparse import Namespace

import torch

from slime.utils.served_models import policy_path
from slime.weight_sync.adapter import AdapterSource, AdapterUpdater
from slime.weight_sync.buckets import WeightSource
from slime.weight_sync.disk import DiskPublisher, DiskUpdater
from slime.weight_sync.distributed import DistributedTransport
from slime.weight_sync.engine_format import engine_format
from slime.weight_sync.engines import Engines
from slime.weight_sync.tensor import TensorTransport
from slime.weight_sync.updater import WeightUpdater


class EngineConnections:
    """Makes the `WeightUpdater` for a set of engines. Collective over the trainer's ranks.

    Args:
        source: the trainer's weights; engines get them in their own format.
        rank, device: of this trainer rank.
        role: what the names of process groups start with.
        address: of this node, for the engines.
        adapters: what is sent instead under `--lora-sync adapter`.
    """

    def __init__(
        self,
        args: Namespace,
        source: WeightSource,
        rank: int,
        device: torch.device,
        role: str,
        address: str,
        adapters: AdapterSource | None = None,
    ) -> None:
        self.adapters = adapters
        self.args = args
        self.source = engine_format(args, source)
        self.rank = rank
        self.device = device
        self.role = role
        self.address = address
        self._publisher: DiskPublisher | None = None

    def connect(self, urls: list[str], engine_slots: list[list[int]], version: int) -> WeightUpdater:
        """The connection to engines that hold weight version `version`. See `TrainRayActor.set_rollout_engines`."""
        args, engines = self.args, Engines(urls)
        pause = args.update_weights_pause_mode
        if args.lora_sync == "adapter":
            sizes = [len(slots) for slots in engine_slots]
            return AdapterUpdater(self.adapters, engines, sizes, self.rank, self.device, version)
        if args.update_weight_transport == "disk":
            # What was published outlives the connection: engines that come later load it, deltas build on it.
            origin = policy_path(args)
            self._publisher = self._publisher or DiskPublisher(args, self.source, self.rank, self.device, origin)
            return DiskUpdater(self._publisher, engines, version, pause)
        if args.colocate:
            transport = TensorTransport(engines, engine_slots, self.rank, self.device)
        else:
            transport = DistributedTransport(
                engines,
                [len(slots) for slots in engine_slots],
                self.rank,
                self.device,
                args.distributed_backend,
                self.address,
                f"slime-{self.role}",
                timeout=60.0 * args.distributed_timeout_minutes,
            )
        return WeightUpdater(
            self.source, transport, engines, self.rank, args.update_weight_buffer_size, version, pause
        )
