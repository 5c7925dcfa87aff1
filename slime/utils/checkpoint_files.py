"""What the small parts of a Hugging Face directory say: config.json, and the headers of its safetensors files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Container
from pathlib import Path
from typing import Any

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")


def copy_small_files(origin: Path, directory: Path, without: Container[str] = ()) -> None:
    """All files of a Hugging Face directory that are no weights: configs, tokenizer, templates."""
    for file in origin.iterdir():
        if file.is_file() and file.name not in without and not file.name.endswith(WEIGHT_SUFFIXES):
            shutil.copy2(file, directory / file.name)


def checkpoint_headers(path: str) -> dict[str, dict[str, Any]]:
    """Shape and dtype of each tensor in the safetensors files of a directory, by their headers.

    Raises:
        ValueError: a file is no safetensors file.
    """
    entries: dict[str, dict[str, Any]] = {}
    for file in sorted(Path(path).glob("*.safetensors")):
        entries |= file_header(file)
    return entries


def file_header(path: Path) -> dict[str, dict[str, Any]]:
    """Shape and dtype of each tensor of one safetensors file.

    Raises:
        ValueError: it is none.
    """
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size:
            raise ValueError(f"a header of {length} bytes does not fit into it")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return header


def missing_bytes(path: Path) -> int:
    """Bytes that a safetensors file lacks, by its header: more than 0 where a download or a copy was cut off.

    Raises:
        ValueError: the header itself is not whole, or it is another kind of file.
    """
    ends = [entry["data_offsets"][1] for entry in file_header(path).values()]
    with open(path, "rb") as file:
        header = 8 + int.from_bytes(file.read(8), "little")
    return header + max(ends, default=0) - path.stat().st_size


def read_config(path: str) -> dict[str, Any]:
    """config.json of a Hugging Face directory."""
    return json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))


def is_hf_directory(path: str | None) -> bool:
    return path is not None and (Path(path) / "config.json").is_file()


class QuantisedError(ValueError):
    """Weights that cannot be trained from."""


def refuse_quantised(path: str) -> None:
    """Tensors of a quantised checkpoint are no weights: they mean nothing without their scales.

    Raises:
        QuantisedError: the config.json of `path` says that it is one.
    """
    if read_config(path).get("quantization_config"):
        raise QuantisedError(
            "its weights are quantised (config.json: quantization_config); bring block-wise FP8 to bfloat16 first: "
            "slime convert fp8-to-bf16"
        )


def quantization_config(block: tuple[int, int], kept: list[str]) -> dict[str, Any]:
    """What config.json says of such a checkpoint. `kept`: modules that are not converted."""
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(block),
        "modules_to_not_convert": kept,
    }


def block_of(config: dict[str, Any]) -> tuple[int, int] | None:
    """The block size of a checkpoint by its config.json; None when it is not quantised.

    Raises:
        ValueError: it is quantised in a way that the trainer's weights cannot be brought into.
    """
    given = config.get("quantization_config")
    if not given:
        return None
    block, method, fmt = given.get("weight_block_size"), given.get("quant_method"), given.get("fmt", "e4m3")
    if method != "fp8" or fmt != "e4m3" or not isinstance(block, (list, tuple)) or len(block) != 2:
        given = f"{method}, format {fmt}, weight_block_size {block}"
        raise ValueError(f"its quantization ({given}) is not block-wise fp8 e4m3")
    return int(block[0]), int(block[1])
