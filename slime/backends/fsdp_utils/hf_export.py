"""Write the policy as a Hugging Face directory: safetensors, config, tokenizer."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
import torch.distributed as dist

from slime.backends.fsdp_utils.checkpoint import write_atomically
from slime.backends.fsdp_utils.weights import ShardedWeights
from slime.modeling.hf import empty_causal_lm

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")


def export_hf(path: str, source: ShardedWeights, origin: str, trust_remote_code: bool = False) -> None:
    """Gather the weights on rank 0 and write them to `path`; collective.

    Args:
        source: where the weights come from, and in which dtype.
        origin: the checkpoint directory that the run started from: architecture, tokenizer and other small files.

    Raises:
        CheckpointError: it could not be written; nothing is left at `path`.
    """

    def write(directory: Path) -> None:
        state = {} if dist.get_rank() == 0 else None
        for spec in source.tensor_specs():
            full = torch.empty(spec.shape, dtype=spec.dtype, device=source.device) if state is not None else None
            source.gather([spec], None if full is None else [full])
            if state is not None:
                state[spec.name] = full.cpu()
        if state is not None:
            # A model without memory, for transformers' own way to write names, shards and config.
            empty_causal_lm(origin, source.dtype, trust_remote_code).save_pretrained(directory, state_dict=state)
            for file in Path(origin).iterdir():
                if file.is_file() and file.name != "config.json" and not file.name.endswith(WEIGHT_SUFFIXES):
                    shutil.copy2(file, directory / file.name)

    write_atomically(Path(path), write)
