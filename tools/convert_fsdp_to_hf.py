"""Checkpoint of the FSDP trainer -> Hugging Face directory, without a GPU and without the trainer; see --help."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from slime.backends.fsdp_utils.hf_export import WEIGHT_SUFFIXES
from slime.modeling.hf import empty_causal_lm

PREFIX = "model_state.model."


def read_weights(directory: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """All parameters of `iter_*/model`, by Hugging Face name.

    Raises:
        ValueError: it is no model of the FSDP trainer.
    """
    stored = dcp.FileSystemReader(directory).read_metadata().state_dict_metadata
    weights = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in stored.items()
        if key.startswith(PREFIX) and isinstance(entry, TensorStorageMetadata)
    }
    if not weights:
        raise ValueError(f"{directory} holds no {PREFIX}*: give the directory of one iteration, SAVE/iter_0000012")
    dcp.load(weights, checkpoint_id=directory, no_dist=True)
    return {key.removeprefix(PREFIX): tensor.to(dtype) for key, tensor in weights.items()}


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
    weights = read_weights(args.input_dir / "model", dtype)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    model = empty_causal_lm(str(args.origin_hf_dir), dtype, args.trust_remote_code)
    model.save_pretrained(args.output_dir, state_dict=weights)
    for file in args.origin_hf_dir.iterdir():
        if file.is_file() and file.name != "config.json" and not file.name.endswith(WEIGHT_SUFFIXES):
            shutil.copy2(file, args.output_dir / file.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
