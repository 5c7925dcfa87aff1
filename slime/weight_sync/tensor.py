"""Weights to engines on the same machine: the engine opens the trainer's own memory.

A bucket is one flat tensor in shared memory (CPU) or on the GPU that trainer and engine share (CUDA IPC). Only its
handle and the table of its tensors travel, as the `flattened_bucket` payload of /update_weights_from_tensor.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import reduce_tensor  # importing it registers the rest with ForkingPickler

from slime.weight_sync.buckets import Bucket
from slime.weight_sync.engines import Engines
from slime.weight_sync.failures import error_of, raise_on_all_ranks

DEVICE_ARGUMENT = 6
"""Which argument of torch's `rebuild_cuda_tensor` is the device."""


def serialize_bucket(bucket: Bucket, flat: torch.Tensor, by_uuid: bool = False) -> str:
    """base64 of the pickled handle. `flat` must stay alive and unchanged until the engine has answered.

    Args:
        by_uuid: name the GPU by its UUID, for an engine whose processes see several: every trainer rank calls its
            own GPU 0. SGLang looks the UUID up among its devices.
    """
    file = io.BytesIO()
    pickler = ForkingPickler(file)
    if by_uuid:
        pickler.dispatch_table[torch.Tensor] = _reduce_by_uuid
    pickler.dump({"flattened_tensor": flat, "metadata": bucket.metadata()})
    return base64.b64encode(file.getvalue()).decode()


def _reduce_by_uuid(tensor: torch.Tensor) -> tuple:
    rebuild, args = reduce_tensor(tensor)
    uuid = str(torch.cuda.get_device_properties(tensor.device).uuid)
    return rebuild, (*args[:DEVICE_ARGUMENT], uuid, *args[DEVICE_ARGUMENT + 1 :])


class TensorTransport:
    """Sends each engine the handles of the trainer ranks that sit on its devices.

    Args:
        engines: all engines.
        engine_ranks: per engine the trainer ranks on its devices, in the engine's tensor-parallel order.
        rank: this trainer rank.
        device: where the bucket lives.

    Every trainer rank must build it (process groups are created for engines that span several ranks).
    """

    def __init__(
        self,
        engines: Engines,
        engine_ranks: Sequence[Sequence[int]],
        rank: int,
        device: torch.device,
    ):
        self.engines = engines
        self.rank = rank
        self.device = device
        self.engine_index: int | None = None
        self.ranks: tuple[int, ...] = ()
        self.group = None
        for index, ranks in enumerate(engine_ranks):
            group = dist.new_group(list(ranks), backend="gloo") if len(ranks) > 1 else None
            if rank in ranks:
                self.engine_index, self.ranks, self.group = index, tuple(ranks), group

    @property
    def sends(self) -> bool:
        return self.engine_index is not None

    def allocate(self, nbytes: int) -> torch.Tensor:
        if self.device.type == "cpu":
            # The default strategy passes file descriptors, which an unrelated process cannot receive.
            torch.multiprocessing.set_sharing_strategy("file_system")
            return torch.empty(nbytes, dtype=torch.uint8).share_memory_()
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def send(self, bucket: Bucket, flat: torch.Tensor, weight_version: str) -> None:
        """Hand the filled bucket to this rank's engine; returns when the engine has copied it.

        Raises:
            WeightSyncError: the engine refused it.
        """
        failure = None
        handles = [serialize_bucket(bucket, flat, by_uuid=self.group is not None and flat.is_cuda)]
        if self.group is not None:
            gathered = [None] * len(self.ranks) if self.rank == self.ranks[0] else None
            dist.gather_object(handles[0], gathered, dst=self.ranks[0], group=self.group)
            handles = gathered
        if self.rank == self.ranks[0]:
            payload = {
                "serialized_named_tensors": handles,
                "load_format": "flattened_bucket",
                "flush_cache": False,
                "weight_version": weight_version,
            }
            failure = error_of(lambda: self.engines.call("/update_weights_from_tensor", payload, [self.engine_index]))
        if self.group is not None:
            raise_on_all_ranks(failure, self.group)  # the others' memory is in use until the engine has answered
        elif failure is not None:
            raise failure

    def collect(self) -> None:
        if self.device.type == "cuda":
            # torch holds memory that it exported until it sees that the other process has closed it.
            torch.cuda.ipc_collect()

    def close(self) -> None:
        if self.group is not None:
            dist.destroy_process_group(self.group)
            self.group = None
