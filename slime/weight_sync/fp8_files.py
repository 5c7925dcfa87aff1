"""Hugging Face directories between bfloat16 and block-wise FP8, file by file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from slime.utils.checkpoint_files import (
    block_of,
    checkpoint_headers,
    copy_small_files,
    file_header,
    quantization_config,
    read_config,
)
from slime.weight_sync.disk_format import INDEX
from slime.weight_sync.fp8 import BLOCK, SCALE_SUFFIX, dequantise, is_quantised_by_default, quantise

Tensors = dict[str, torch.Tensor]


def to_fp8(origin: Path, target: Path, block: tuple[int, int] = BLOCK, device: str = "cpu") -> int:
    """Write `origin` to the new directory `target` with the matrices of its decoder layers in FP8; how many.

    Raises:
        ValueError: there are no matrices to convert, or they are quantised already.
    """
    config = read_config(str(origin))
    if config.get("quantization_config"):
        raise ValueError(f"{origin} is quantised already (config.json: quantization_config)")
    shapes = {name: tuple(entry["shape"]) for name, entry in checkpoint_headers(str(origin)).items()}
    chosen = {name for name, shape in shapes.items() if is_quantised_by_default(name, shape)}
    if not chosen:
        raise ValueError(f"{origin} has no matrices *.layers.*.weight in safetensors files")

    def convert(tensors: Tensors) -> Tensors:
        out: Tensors = {}
        for name, tensor in tensors.items():
            if name in chosen:
                out[name], out[name + SCALE_SUFFIX] = (part.cpu() for part in quantise(tensor.to(device), block))
            else:
                out[name] = tensor
        return out

    matrices = {name.removesuffix(".weight") for name, shape in shapes.items() if len(shape) == 2} | {"lm_head"}
    kept = sorted(name for name in matrices if f"{name}.weight" not in chosen)
    _rewrite(origin, target, convert, config | {"quantization_config": quantization_config(block, kept)})
    return len(chosen)


def to_bf16(origin: Path, target: Path, device: str = "cpu") -> int:
    """Write `origin` to the new directory `target` with its FP8 matrices in bfloat16; how many.

    Raises:
        ValueError: it has no block-wise FP8 weights.
    """
    config = read_config(str(origin))
    block = block_of(config)
    if block is None:
        raise ValueError(f"{origin} has no FP8 weights (config.json: quantization_config)")
    files = _files_of(origin)
    count = 0

    def convert(tensors: Tensors) -> Tensors:
        nonlocal count
        out: Tensors = {}
        for name, tensor in tensors.items():
            if name.endswith(SCALE_SUFFIX):
                continue
            scale = name + SCALE_SUFFIX
            if scale in files:
                # A matrix and its scales may stand in different files.
                scales = tensors[scale] if scale in tensors else load_file(origin / files[scale])[scale]
                out[name] = dequantise(tensor.to(device), scales.to(device), block).bfloat16().cpu()
                count += 1
            else:
                out[name] = tensor
        return out

    _rewrite(origin, target, convert, {key: value for key, value in config.items() if key != "quantization_config"})
    return count


def _files_of(directory: Path) -> dict[str, str]:
    """The file of each tensor."""
    files: dict[str, str] = {}
    for path in sorted(directory.glob("*.safetensors")):
        files |= dict.fromkeys(file_header(path), path.name)
    return files


def _rewrite(origin: Path, target: Path, convert: Callable[[Tensors], Tensors], config: dict[str, Any]) -> None:
    """Every file of weights through `convert`, under its own name; index and config to match."""
    target.mkdir(parents=True)
    weight_map: dict[str, str] = {}
    total = 0
    for path in sorted(origin.glob("*.safetensors")):
        tensors = {name: tensor.contiguous() for name, tensor in convert(load_file(path)).items()}
        if tensors:
            save_file(tensors, target / path.name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, path.name)
        total += sum(tensor.nbytes for tensor in tensors.values())
    if (origin / INDEX).is_file():
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (target / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    copy_small_files(origin, target, without=("config.json",))
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
