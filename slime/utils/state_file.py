"""Small checkpoint files in `torch.save`'s format, written and read without torch and without running code.

A file holds plain values only: None, bool, int, float, str, bytes, list, tuple, dict, and numpy arrays as tagged
bytes. `torch.load(path, weights_only=True)` reads it, and plain values that `torch.save` wrote are read here. The
unpickler knows no class, so a hostile file is refused rather than executed.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from typing import Any

import numpy as np

from slime.utils.misc import atomic_write

ARRAY_TAG = "__ndarray__"
_PLAIN = (bool, int, float, str, type(None))


def save(path: str, value: Any) -> None:
    """Write `value` to `path` atomically: a full disk or a kill leaves the previous file as it was.

    Raises:
        TypeError: naming the place of a value that is not plain.
    """
    payload = io.BytesIO()
    with zipfile.ZipFile(payload, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(_plain(value, "state"), protocol=2))
        archive.writestr("archive/byteorder", "little")
        archive.writestr("archive/version", "3\n")
    atomic_write(path, payload.getvalue())


def load(path: str) -> Any:
    """Read what `save` wrote.

    Raises:
        ValueError: the file is damaged or holds more than plain values.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            if not names:
                raise ValueError(f"{path} is not a state file: no data.pkl inside")
            return _restore(_PlainUnpickler(io.BytesIO(archive.read(names[0]))).load())
    except (zipfile.BadZipFile, pickle.UnpicklingError, EOFError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str):
        if (module, name) == ("_codecs", "encode"):  # how protocol 2 writes bytes
            return _latin1
        raise pickle.UnpicklingError(f"it holds a {module}.{name}, only plain values are allowed")

    def persistent_load(self, pid):
        raise pickle.UnpicklingError("it holds tensors, only plain values are allowed")


def _latin1(text: str, encoding: str) -> bytes:
    return text.encode("latin1")


def _plain(value: Any, where: str) -> Any:
    if type(value) in _PLAIN or isinstance(value, bytes):
        return value
    if isinstance(value, dict):
        return {_plain(k, where): _plain(v, f"{where}[{k!r}]") for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_plain(v, f"{where}[{i}]") for i, v in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, _PLAIN):  # str and int enums, subclasses
        return next(kind for kind in (int, float, str) if isinstance(value, kind))(value)
    if hasattr(value, "__array__"):
        array = np.ascontiguousarray(value)
        if not array.dtype.hasobject:
            return {ARRAY_TAG: array.tobytes(), "dtype": str(array.dtype), "shape": list(array.shape)}
    raise TypeError(f"{where} is a {type(value).__name__}; a state file holds plain values and arrays only")


def _restore(value: Any) -> Any:
    if isinstance(value, dict):
        if ARRAY_TAG in value:
            return np.frombuffer(value[ARRAY_TAG], dtype=value["dtype"]).reshape(value["shape"]).copy()
        return {k: _restore(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_restore(v) for v in value]
    return tuple(_restore(v) for v in value) if isinstance(value, tuple) else value
