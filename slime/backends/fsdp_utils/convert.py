"""Checkpoint of the FSDP trainer -> Hugging Face directory, without a GPU and without the trainer.

Weights lie in a file while they are converted, so that a model may be larger than memory.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from slime.modeling.hf import empty_causal_lm
from slime.utils.checkpoint_files import copy_small_files

PREFIX = "model_state.model."


def read_weights(directory: Path, dtype: torch.dtype, scratch: Path) -> dict[str, torch.Tensor]:
    """All parameters of `iter_*/model`, by Hugging Face name, in memory that is backed by files in `scratch`.

    Raises:
        ValueError: it is no model of the FSDP trainer.
    """
    stored = dcp.FileSystemReader(directory).read_metadata().state_dict_metadata
    entries = {
        key: entry
        for key, entry in stored.items()
        if key.startswith(PREFIX) and isinstance(entry, TensorStorageMetadata)
    }
    if not entries:
        raise ValueError(f"{directory} holds no {PREFIX}*: give the directory of one iteration, SAVE/iter_0000012")
    weights = {}
    for index, (key, entry) in enumerate(entries.items()):
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        dcp.load({key: tensor}, checkpoint_id=directory, no_dist=True)
        weights[key.removeprefix(PREFIX)] = _on_disk(tensor.to(dtype), scratch / f"{index}.bin")
    return weights


def _on_disk(tensor: torch.Tensor, file: Path) -> torch.Tensor:
    """A copy in memory that the system may write out and forget."""
    copy = torch.from_file(str(file), shared=True, size=tensor.numel(), dtype=tensor.dtype)
    return copy.copy_(tensor.flatten()).view(tensor.shape)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="FSDP checkpoint -> Hugging Face directory")
    parser.add_argument("--input-dir", required=True, type=Path, help="one iteration: SAVE/iter_0000012")
    parser.add_argument("--output-dir", required=True, type=Path, help="Hugging Face directory to write")
    parser.add_argument("--origin-hf-dir", required=True, type=Path, help="where config and tokenizer come from")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--force", action="store_true", help="replace the output directory")
    parser.add_argument("--trust-remote-code", action="store_true")
    args = parser.parse_args(argv)
    if args.output_dir.exists() and not args.force:
        parser.error(f"--output-dir {args.output_dir} exists: name a new directory or add --force")
    dtype = getattr(torch, args.dtype)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.output_dir) as scratch:
        try:
            weights = read_weights(args.input_dir / "model", dtype, Path(scratch))
        except (ValueError, dcp.api.CheckpointException) as error:
            parser.error(f"--input-dir {args.input_dir}: {error}")
        model = empty_causal_lm(str(args.origin_hf_dir), dtype, args.trust_remote_code)
        model.save_pretrained(args.output_dir, state_dict=weights)
    copy_small_files(args.origin_hf_dir, args.output_dir, without=("config.json",))
    return 0
