"""Low-rank adapters to engines that keep the base model: a few megabytes per update instead of all weights.

The engines serve the adapter under one name, which requests give as `lora_path`. Trainer rank 0 sends it by value over
HTTP to every engine, which replaces the one before.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Sequence
from time import perf_counter
from typing import Any, Protocol

import torch

from slime.utils.served_models import ADAPTER_NAME
from slime.weight_sync.buckets import Bucket, WeightSource
from slime.weight_sync.engines import Engines, WeightSyncError
from slime.weight_sync.failures import error_of, raise_on_all_ranks
from slime.weight_sync.updater import WeightUpdater

NOT_LOADED = 400
"""What /unload_lora_adapter answers for a name that it does not have."""


class AdapterSource(WeightSource, Protocol):
    """A trainer's adapters under peft's names."""

    def config(self) -> dict[str, Any]:
        """As in peft's adapter_config.json."""
        ...


class AdapterUpdater(WeightUpdater):
    """A `WeightUpdater` that sends adapters.

    Args:
        adapters: the trainer's.
        engines: those that get them; each has the base model.
        engine_sizes: tensor-parallel ranks of each engine.
        rank: this trainer rank; 0 sends.
        device: where adapters are gathered.
        version: weight version that the engines hold now.
    """

    def __init__(
        self,
        adapters: AdapterSource,
        engines: Engines,
        engine_sizes: Sequence[int],
        rank: int,
        device: torch.device,
        version: int = 0,
    ) -> None:
        self.adapters = adapters
        self.engines = engines
        self.engine_sizes = list(engine_sizes)
        self.rank = rank
        self.device = device
        self.version = version
        self.bucket = Bucket(tuple(adapters.tensor_specs()))

    def _push(self) -> dict[str, float]:
        marks = [perf_counter()]
        flat = None
        if self.rank == 0:
            flat = torch.empty(self.bucket.numel, dtype=self.bucket.dtype, device=self.device)
        self.adapters.gather(self.bucket.specs, None if flat is None else self.bucket.views(flat))
        marks.append(perf_counter())
        raise_on_all_ranks(None if flat is None else error_of(lambda: self._replace(flat.cpu())))
        marks.append(perf_counter())
        return {
            "perf/update_weights_gather_time": marks[1] - marks[0],
            "perf/update_weights_send_time": marks[2] - marks[1],
            "perf/update_weights_bytes": float(self.bucket.nbytes * sum(self.engine_sizes)),
        }

    def _replace(self, flat: torch.Tensor) -> None:
        engines = self.engines
        content = pickle.dumps({"flattened_tensor": flat, "metadata": self.bucket.metadata()})
        serialized = base64.b64encode(content).decode()
        engines.call("/pause_generation", {"mode": "abort"})
        engines.flush_cache()
        for future in [engines.start(i, "/unload_lora_adapter", _named()) for i in range(len(engines))]:
            error = future.exception()
            if error is not None and getattr(error, "status", None) != NOT_LOADED:
                raise error
        loads = []
        for i, size in enumerate(self.engine_sizes):
            payload = _named() | {
                "config_dict": self.adapters.config(),
                "serialized_named_tensors": [serialized] * size,
                "load_format": "flattened_bucket",
            }
            loads.append(engines.start(i, "/load_lora_adapter_from_tensors", payload))
        for load in loads:
            load.result()
        engines.call("/update_weight_version", {"new_version": str(self.version), "abort_all_requests": False})
        engines.call("/continue_generation", {})

    def check(self) -> None:
        """There is nothing to compare adapters with.

        Raises:
            WeightSyncError: always.
        """
        raise WeightSyncError("adapters cannot be checked: engines do not give them back")

    def close(self) -> None:
        self.engines.close()


def _named() -> dict[str, Any]:
    return {"lora_name": ADAPTER_NAME}
