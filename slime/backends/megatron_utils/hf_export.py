"""Write the policy as a Hugging Face directory, shard by shard: no more than one file's tensors are held at a time."""

from __future__ import annotations

import json
from collections.abc import Container
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from slime.backends.common.checkpoint import write_atomically
from slime.backends.megatron_utils.architecture import read_architecture
from slime.backends.megatron_utils.hf_files import INDEX, SINGLE, HFTensors
from slime.backends.megatron_utils.name_maps import DRAFT_LAYERS, KEPT
from slime.utils.checkpoint_files import copy_small_files
from slime.weight_sync.buckets import WeightSource

SHARD_BYTES = 5 * 2**30
DRAFTS = "model-mtp.safetensors"


def export_hf(path: str, source: WeightSource, origin: str, shard_bytes: int = SHARD_BYTES) -> None:
    """Gather the weights on rank 0 and write them to `path`; collective.

    Args:
        source: names are the checkpoint's own.
        origin: the checkpoint directory that the run started from; config, tokenizer and other small files are copied,
            and layers for multi-token prediction that `source` does not have.

    Raises:
        CheckpointError: it could not be written; nothing is left at `path`.
    """

    def write(directory: Path) -> None:
        shards = _shards(source.tensor_specs(), shard_bytes)
        weight_map = {}
        for number, specs in enumerate(shards, 1):
            name = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            weight_map |= {spec.name: name for spec in specs}
            out = None
            if dist.get_rank() == 0:
                out = [torch.empty(spec.shape, dtype=spec.dtype, device=source.device) for spec in specs]
            source.gather(specs, out)
            if out is not None:
                tensors = {spec.name: tensor.cpu().contiguous() for spec, tensor in zip(specs, out, strict=True)}
                save_file(tensors, directory / name, metadata={"format": "pt"})
        if dist.get_rank() == 0:
            kept = _draft_layers(origin, without=weight_map)
            if kept:
                weight_map |= dict.fromkeys(kept, DRAFTS)
                save_file(kept, directory / DRAFTS, metadata={"format": "pt"})
            if len(shards) > 1 or kept:
                size = sum(spec.nbytes for specs in shards for spec in specs)
                size += sum(tensor.nbytes for tensor in kept.values())
                index = {"metadata": {"total_size": size}, "weight_map": weight_map}
                (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")
            copy_small_files(Path(origin), directory)

    write_atomically(Path(path), write)


def _draft_layers(origin: str, without: Container[str]) -> dict[str, torch.Tensor]:
    """The checkpoint's layers for multi-token prediction."""
    kept = KEPT.get(read_architecture(origin).family)
    names = draft_layer_names(origin)
    if not (names or kept):
        return {}
    with HFTensors(origin) as checkpoint:
        names += [name for name in checkpoint.names() if kept and name.startswith(kept)]
        return {name: checkpoint[name] for name in names if name not in without}


def draft_layer_names(path: str) -> list[str]:
    """The tensors of a checkpoint's layers for multi-token prediction."""
    architecture = read_architecture(path)
    if not architecture.mtp_layers:
        return []
    first, kind = architecture["num_layers"], DRAFT_LAYERS[architecture.family]
    prefixes = tuple(kind.prefix.format(draft=i, layer=first + i) for i in range(architecture.mtp_layers))
    with HFTensors(path) as checkpoint:
        return [name for name in checkpoint.names() if name.startswith(prefixes)]


def _shards(specs, shard_bytes: int) -> list[list]:
    """Consecutive tensors of one dtype, at most `shard_bytes` together."""
    shards: list[list] = []
    for spec in specs:
        fits = shards and sum(s.nbytes for s in shards[-1]) + spec.nbytes <= shard_bytes
        if fits and shards[-1][0].dtype == spec.dtype:
            shards[-1].append(spec)
        else:
            shards.append([spec])
    return shards
