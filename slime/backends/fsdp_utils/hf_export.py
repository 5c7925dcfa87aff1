"""Write the policy as a Hugging Face directory: safetensors, config, tokenizer."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from slime.backends.common.checkpoint import write_atomically
from slime.backends.fsdp_utils.weights import ShardedWeights
from slime.modeling.hf import empty_causal_lm
from slime.utils.checkpoint_files import copy_small_files


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
            copy_small_files(Path(origin), directory, without=("config.json",))

    write_atomically(Path(path), write)
