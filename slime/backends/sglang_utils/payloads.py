"""What SGLang takes for granted about pushed weights: its scheduler ends where that does not hold.

Payloads are looked at without importing or opening what is in them.
"""

from __future__ import annotations

import base64
import binascii
import io
import pickle
from collections.abc import Iterable
from typing import Any

from slime.backends.sglang_utils.asgi import Refused
from slime.utils.checkpoint_files import checkpoint_headers

Shapes = dict[str, tuple[int, ...]]


class _Opaque:
    """In place of everything that a payload names: takes whatever the pickle does with it."""

    def __init__(self, *args: Any, **kwargs: Any):
        self.args = args
        self.state: Any = {}

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


class _Outline(pickle.Unpickler):
    """Plain containers and numbers as they are, all else opaque."""

    def find_class(self, module: str, name: str) -> Any:
        return _Opaque


def checkpoint_shapes(model_path: str) -> Shapes:
    """Shape of each tensor in the safetensors files of a directory, by their headers."""
    return {name: tuple(entry["shape"]) for name, entry in checkpoint_headers(model_path).items()}


def check_shapes(named: Iterable[tuple[Any, Any]], known: Shapes) -> None:
    """Refuse a tensor whose shape is not that of the checkpoint; names that it does not have are SGLang's to judge.

    Raises:
        Refused: with name and shapes.
    """
    for name, shape in named:
        expected = known.get(name) if isinstance(name, str) else None
        if expected is not None and isinstance(shape, (list, tuple)) and tuple(shape) != expected:
            raise Refused(f"{name}: shape {tuple(shape)} given, the model has {expected}")


def check_payload(serialized: Any, load_format: Any, known: Shapes) -> None:
    """Look at one rank's `serialized_named_tensors`.

    Raises:
        Refused: it is no base64 pickle of (name, tensor) pairs or of a flattened bucket, or a shape is wrong.
    """
    if not isinstance(serialized, str):
        raise Refused(f"a serialized payload must be a base64 string, got {type(serialized).__name__}")
    try:
        content = _Outline(io.BytesIO(base64.b64decode(serialized, validate=True))).load()
    except (binascii.Error, ValueError) as error:
        raise Refused(f"the payload is not base64: {error}") from error
    except Exception as error:  # a broken pickle can raise anything
        raise Refused(f"the payload cannot be unpickled: {type(error).__name__}: {error}") from error
    if load_format == "flattened_bucket":
        whole = isinstance(content, dict) and isinstance(content.get("flattened_tensor"), _Opaque)
        if not whole or not isinstance(content.get("metadata"), (list, tuple)):
            raise Refused("a flattened bucket must be a dict with flattened_tensor and metadata")
        entries = [meta.state for meta in content["metadata"] if isinstance(meta, _Opaque)]
        check_shapes(((entry.get("name"), _size(entry.get("shape"))) for entry in entries), known)
    elif not isinstance(content, (list, tuple)) or not all(map(_is_named_tensor, content)):
        raise Refused("a payload must be a list of (name, tensor)")
    else:
        # A tensor by value is (storage, offset, size, stride, ...); other kinds are not looked into.
        check_shapes(((name, _size(tensor.args[2:3])) for name, tensor in content), known)


def _size(value: Any) -> Any:
    """The tuple inside torch.Size, or inside a one-element slice of arguments."""
    if isinstance(value, _Opaque):
        value = value.args
    return value[0] if isinstance(value, tuple) and len(value) == 1 and isinstance(value[0], tuple) else None


def _is_named_tensor(pair: Any) -> bool:
    if not isinstance(pair, (list, tuple)) or len(pair) != 2:
        return False
    return isinstance(pair[0], str) and isinstance(pair[1], _Opaque)
