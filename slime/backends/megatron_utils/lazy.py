"""Conversion tensor by tensor: a model without memory describes a checkpoint, and each tensor is made when it is
written or asked for, so that a model may be larger than memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import DefaultLoadPlanner, LoadPlan, ReadItem
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.overrides import TorchFunctionMode

from slime.backends.megatron_utils.weights import MegatronWeights, Shared, global_tensors

META = torch.device("meta")
_FACTORIES = {torch.empty, torch.zeros, torch.ones, torch.full, torch.arange, torch.tensor, torch.rand, torch.randn}


class _EverythingOnMeta(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function in _FACTORIES:
            kwargs["device"] = META
        return function(*args, **kwargs)


@contextmanager
def without_memory():
    """Modules that are built inside have tensors without memory, whatever device they ask for."""
    with _EverythingOnMeta():
        yield


class _Planner(MCoreSavePlanner):
    """Hands out the tensors that are written, one after the other."""

    def __init__(self, make: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__(dedup_replicated_tensors=False, flatten_state_dict=False)
        self._make = make

    def resolve_data(self, write_item):
        data = super().resolve_data(write_item)
        return self._make(data) if torch.is_tensor(data) and data.is_meta else data


class LazySave(TorchDistSaveShardedStrategy):
    """Writes a model that has no memory in Megatron's torch_dist format.

    Args:
        model: of tensors on the meta device.
        tensor_of: the real parameter of a global name; called when it is written.
    """

    def __init__(self, model: torch.nn.Module, tensor_of: Callable[[str], torch.Tensor]):
        super().__init__("torch_dist", 1)
        self._names = {_storage(tensor): name for name, tensor in global_tensors([model]).items()}
        self._tensor_of = tensor_of
        self._last: tuple[str, torch.Tensor] | None = None

    def save(self, sharded_state_dict: Any, checkpoint_dir: Path) -> None:
        state, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        dcp.save(
            mcore_to_pyt_state_dict(state, False),
            storage_writer=dcp.FileSystemWriter(checkpoint_dir, thread_count=1),
            planner=_Planner(self._part),
        )

    def _part(self, view: torch.Tensor) -> torch.Tensor:
        """The part of a real parameter that `view` is of the one without memory."""
        name = self._names[_storage(view)]
        if self._last is None or self._last[0] != name:
            self._last = (name, self._tensor_of(name).contiguous())
        return self._last[1].as_strided(view.shape, view.stride(), view.storage_offset())


class LazyWeights(MegatronWeights):
    """The weights of a torch_dist checkpoint, read when they are asked for; in one process.

    Args:
        model: of tensors on the meta device.
        path: of one iteration.
    """

    def __init__(self, model, architecture, dtype: torch.dtype, path: Path):
        super().__init__([model], architecture, dtype, torch.device("cpu"))
        self._sharded = model.sharded_state_dict()
        self._reader = dcp.FileSystemReader(path)
        self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)

    def _exchange(self, items: list[Shared]) -> dict[tuple[str, int], torch.Tensor]:
        return {(item.name, 0): self._read(self._sharded[item.name]) for item in items}

    def _read(self, sharded: ShardedTensor | ShardedTensorFactory) -> torch.Tensor:
        if isinstance(sharded, ShardedTensorFactory):  # stored in parts
            return sharded.merge_fn(dict_list_map_outplace(self._read, sharded.build()))
        if sharded.key not in self._metadata.state_dict_metadata:
            raise KeyError(f"{self._reader.path} has no tensor {sharded.key!r}: it is of another model")
        target = torch.zeros((1,) * sharded.prepend_axis_num + sharded.local_shape, dtype=sharded.dtype)
        chunk = ChunkStorageMetadata(torch.Size(sharded.global_offset), target.shape)
        stored = self._metadata.state_dict_metadata[sharded.key]
        items = create_read_items_for_chunk_list(sharded.key, stored, [chunk])
        self._reader.read_data(LoadPlan(items), _Into(target)).wait()
        return target.view(sharded.local_shape)


class _Into(DefaultLoadPlanner):
    """Reads into parts of one tensor."""

    def __init__(self, target: torch.Tensor):
        super().__init__()
        self._target = target

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return narrow_tensor_by_index(self._target, read_item.dest_offsets, read_item.lengths)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
