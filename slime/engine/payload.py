"""Tensors that arrive pickled, through an allow-list: nothing else in a payload is ever imported or called.

Understood: tensors by value, by file-system shared memory (CPU) and by CUDA IPC handle, in lists, tuples and dicts,
and the metadata of flattened buckets.
"""

from __future__ import annotations

import base64
import binascii
import io
import pickle
from types import SimpleNamespace
from typing import Any

import torch
from torch.multiprocessing import reductions

from slime.engine.protocol import RequestError


def _load_storage(data: bytes):
    """torch's by-value storage, which torch itself would load with a full unpickler."""
    return torch.load(io.BytesIO(data), weights_only=True)


def _rebuild_cuda_tensor(*args):
    """torch's CUDA IPC tensor on this process's GPU, whatever number the sender's process gives that GPU."""
    args = list(args)
    args[6] = torch.cuda.current_device()
    return reductions.rebuild_cuda_tensor(*args)


def _refuse_fd(*args):
    raise RequestError(
        "the tensor is shared by file descriptor, which another process tree cannot open: call "
        "torch.multiprocessing.set_sharing_strategy('file_system') before pickling"
    )


_ALLOWED: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
    ("torch._utils", "_rebuild_parameter"): torch._utils._rebuild_parameter,
    ("torch.storage", "_load_from_bytes"): _load_storage,
    ("torch.multiprocessing.reductions", "rebuild_tensor"): reductions.rebuild_tensor,
    ("torch.multiprocessing.reductions", "rebuild_storage_filename"): reductions.rebuild_storage_filename,
    ("torch.multiprocessing.reductions", "rebuild_storage_empty"): reductions.rebuild_storage_empty,
    ("torch.multiprocessing.reductions", "rebuild_typed_storage"): reductions.rebuild_typed_storage,
    ("torch.multiprocessing.reductions", "rebuild_storage_fd"): _refuse_fd,
    ("torch.multiprocessing.reductions", "rebuild_cuda_tensor"): _rebuild_cuda_tensor,
    ("torch", "Tensor"): torch.Tensor,
    ("torch.nn.parameter", "Parameter"): torch.nn.Parameter,
    ("torch", "Size"): torch.Size,
    ("torch", "device"): torch.device,
    ("torch.storage", "UntypedStorage"): torch.storage.UntypedStorage,
    ("torch.storage", "TypedStorage"): torch.storage.TypedStorage,
    ("torch", "UntypedStorage"): torch.storage.UntypedStorage,
    ("collections", "OrderedDict"): dict,
    ("types", "SimpleNamespace"): SimpleNamespace,
    **{("builtins", t.__name__): t for t in (set, frozenset, slice, complex, bytearray)},
}
_DTYPES = {
    name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype) and value.itemsize <= 16
}

LOAD_FORMATS = (None, "flattened_bucket")
"""How the tensors of an update come: each by itself, or all in one."""


class SafeUnpickler(pickle.Unpickler):
    """Finds nothing but what rebuilds tensors and plain containers."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        if (module, name) not in _ALLOWED:
            raise RequestError(f"the payload names {module}.{name}, which is not allowed in weight payloads")
        return _ALLOWED[module, name]


def loads(serialized: Any) -> Any:
    """Objects of a base64 pickle.

    Raises:
        RequestError: not base64, not a pickle, a name outside the allow-list, or shared memory that is gone.
    """
    if not isinstance(serialized, str):
        raise RequestError(f"a serialized payload must be a base64 string, got {type(serialized).__name__}")
    try:
        data = base64.b64decode(serialized, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(f"the payload is not base64: {error}") from error
    try:
        return SafeUnpickler(io.BytesIO(data)).load()
    except RequestError:
        raise
    except Exception as error:  # a hostile or broken pickle can raise anything
        raise RequestError(f"the payload cannot be unpickled: {type(error).__name__}: {error}") from error


def parse_dtype(name: Any) -> torch.dtype:
    """`bfloat16` or `torch.bfloat16`, as text or dtype."""
    if isinstance(name, torch.dtype):
        return name
    dtype = _DTYPES.get(str(name).removeprefix("torch."))
    if dtype is None:
        raise RequestError(f"unknown dtype {name!r}")
    return dtype


def named_tensors(payload: Any) -> list[tuple[str, torch.Tensor]]:
    """A plain payload: a list of (name, tensor)."""
    pairs = payload.items() if isinstance(payload, dict) else payload
    try:
        out = [(name, tensor) for name, tensor in pairs]
    except (TypeError, ValueError) as error:
        raise RequestError("a payload must be a list of (name, tensor)") from error
    for name, tensor in out:
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise RequestError("a payload must be a list of (name, tensor)")
    return out


def unflatten_bucket(payload: Any) -> list[tuple[str, torch.Tensor]]:
    """A `flattened_bucket`: views of one flat tensor, by metadata with element offsets (name, shape, start, end)."""
    if not isinstance(payload, dict) or not {"flattened_tensor", "metadata"} <= set(payload):
        raise RequestError("a flattened bucket must be a dict with flattened_tensor and metadata")
    flat = payload["flattened_tensor"]
    if not isinstance(flat, torch.Tensor) or not isinstance(payload["metadata"], (list, tuple)):
        raise RequestError("a flattened bucket must hold a tensor and a list")
    flat, out = flat.reshape(-1), []
    for meta in payload["metadata"]:
        try:
            shape, dtype = torch.Size(meta.shape), parse_dtype(meta.dtype)
            name, start, end = str(meta.name), int(meta.start_idx), int(meta.end_idx)
        except (AttributeError, TypeError, ValueError) as error:
            raise RequestError(f"bad flattened bucket metadata: {error}") from error
        piece = flat[start:end]
        if dtype != flat.dtype:
            if flat.dtype != torch.uint8 or len(piece) % dtype.itemsize or start % dtype.itemsize:
                raise RequestError(f"{name}: a bucket of {flat.dtype} cannot hold {dtype}")
            piece = piece.view(dtype)
        if not 0 <= start <= end <= len(flat) or piece.numel() != shape.numel():
            raise RequestError(f"{name}: elements [{start}, {end}) of {len(flat)} do not make {tuple(shape)}")
        out.append((name, piece.view(shape)))
    return out
