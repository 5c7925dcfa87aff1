"""One weight update: pause the engines, stream the buckets, raise the version, let the engines go on."""

from __future__ import annotations

from time import perf_counter
from typing import Protocol

import torch

from slime.weight_sync.buckets import Bucket, WeightSource, plan_buckets
from slime.weight_sync.engines import Engines, WeightSyncError
from slime.weight_sync.failures import error_of, raise_on_all_ranks
from slime.weight_sync.pipeline import SendPipeline


class Transport(Protocol):
    """Carries filled buckets to the engines."""

    sends: bool
    """Whether this rank needs the full tensors."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """uint8 memory that buckets are filled in, where the transport can send it from."""
        ...

    def send(self, bucket: Bucket, flat: torch.Tensor, weight_version: str) -> None:
        """Returns when the engines have copied it, so that the memory may be filled again.

        Called in a thread of its own, when the device has filled `flat`.
        """
        ...

    def collect(self) -> None:
        """The update's memory is no longer referred to: give it back."""
        ...

    def close(self) -> None: ...


class WeightUpdater:
    """Drives an update over all trainer ranks. `update` and `check` are collective.

    Args:
        source: the trainer's weights.
        transport: how buckets travel.
        engines: all engines; trainer rank 0 controls them.
        rank: this trainer rank.
        max_bytes: bucket size.
        version: weight version that the engines hold now.
        pause_mode: what happens to requests in flight: "abort" (partial output is returned), "retract" (computed
            again from their tokens) or "in_place" (they keep their KV cache).
    """

    def __init__(
        self,
        source: WeightSource,
        transport: Transport,
        engines: Engines,
        rank: int,
        max_bytes: int,
        version: int = 0,
        pause_mode: str = "abort",
    ):
        self.source = source
        self.transport = transport
        self.engines = engines
        self.rank = rank
        self.version = version
        self.pause_mode = pause_mode
        self.buckets = plan_buckets(source.tensor_specs(), max_bytes)

    def update(self) -> dict[str, float]:
        """Bring every engine to the trainer's weights; seconds per phase and bytes sent.

        The engines stay paused when it fails: half-updated weights must not answer requests.

        Raises:
            WeightSyncError: an engine failed; raised on every rank, so that all can try again.
        """
        self.version += 1
        try:
            return self._push() | {"train/weight_version": float(self.version)}
        except WeightSyncError:
            self.version -= 1
            raise

    def _push(self) -> dict[str, float]:
        marks = [perf_counter()]
        failure = None
        if self.rank == 0:
            failure = error_of(self._pause)
        raise_on_all_ranks(failure)
        marks.append(perf_counter())
        gather_time = 0.0
        # The memory is given back afterwards: between updates it is the training's.
        pipeline = SendPipeline(self.transport, self.buckets, str(self.version)) if self.transport.sends else None
        for bucket in self.buckets:
            flat = None if pipeline is None else pipeline.buffer(bucket)
            start = perf_counter()
            self.source.gather(bucket.specs, None if flat is None else bucket.views(flat))
            gather_time += perf_counter() - start
            if flat is not None:
                pipeline.send(bucket, flat)
        if pipeline is not None:
            failure = pipeline.finish()
        flat = pipeline = None
        self.transport.collect()
        raise_on_all_ranks(failure)
        marks.append(perf_counter())
        if self.rank == 0:
            failure = error_of(self._resume)
        raise_on_all_ranks(failure)
        marks.append(perf_counter())
        return {
            "perf/update_weights_pause_time": marks[1] - marks[0],
            "perf/update_weights_gather_time": gather_time,
            "perf/update_weights_send_time": marks[2] - marks[1] - gather_time,
            "perf/update_weights_continue_time": marks[3] - marks[2],
            "perf/update_weights_bytes": float(sum(bucket.nbytes for bucket in self.buckets)),
        }

    def _pause(self) -> None:
        self.engines.call("/pause_generation", {"mode": self.pause_mode})
        if self.pause_mode == "abort":
            self.engines.flush_cache()
        self.engines.call("/begin_weight_update", {})

    def _resume(self) -> None:
        self.engines.call("/end_weight_update", {})
        self.engines.call("/continue_generation", {})

    def check(self) -> None:
        """Prove that an update reaches every parameter: snapshot, overwrite, update again, compare.

        Raises:
            WeightSyncError: a tensor differs; the engine's message names it.
        """
        if self.rank == 0:
            self.engines.call("/weights_checker", {"action": "snapshot"})
            self.engines.call("/weights_checker", {"action": "reset_tensors"})
        self._push()
        if self.rank == 0:
            self.engines.call("/weights_checker", {"action": "compare"})

    def close(self) -> None:
        self.transport.close()
        self.engines.close()
