"""Checkpoints in Megatron's torch_dist format, readable in any layout of ranks.

`{save}/iter_{rollout_id:07d}/` holds Megatron's files, `rng.pt` and `meta.json`. Everything is written under a
temporary name and renamed when complete; the tracker file, which names the checkpoint to resume, comes last.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from torch import nn

from slime.backends.fsdp_utils.checkpoint import (
    TRACKER,
    CheckpointError,
    Progress,
    rng_state,
    set_rng_state,
    write_atomically,
)
from slime.backends.megatron_utils.optimizer import Optimizer

# Optimizer state in the order of the model's own tensors, so that any layout can read it.
_METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}

REFERENCE = "reference"
"""Directory of the reference model's weights, in checkpoints of runs where it is not what the run started from."""


def latest_checkpoint(root: str | None, step: int | None = None) -> Path | None:
    """The directory that the tracker in `root` names, or that of rollout `step`; None when there is no tracker.

    Raises:
        CheckpointError: the tracker is unreadable or names a directory that is not there.
    """
    if root is None or not (Path(root) / TRACKER).is_file():
        return None
    text = (Path(root) / TRACKER).read_text().strip() if step is None else str(step)
    if not text.isdigit():
        raise CheckpointError(f"{Path(root) / TRACKER} should hold a rollout id, not {text!r}")
    path = Path(root) / f"iter_{int(text):07d}"
    for candidate in (path, path.with_name(f".{path.name}.old")):  # the second: killed while it was being replaced
        if (candidate / "meta.json").is_file():
            return candidate
    raise CheckpointError(f"iteration {text} of {root} is wanted, but {path} is not a checkpoint")


def save_checkpoint(
    root: str,
    rollout_id: int,
    chunks: Sequence[nn.Module],
    optimizer: Optimizer | None,
    progress: Progress,
    reference: Callable[[], AbstractContextManager] | None = None,
) -> None:
    """Write the checkpoint of `rollout_id`; collective over all ranks.

    Args:
        chunks: model chunks, unwrapped.
        optimizer: None saves weights only.
        reference: a context in which the chunks hold the reference model's weights, to save them, too.

    Raises:
        CheckpointError: on every rank when one fails (disk full, ...). The previous checkpoint stays valid.
    """
    rng = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(rng_state(), rng, dst=0)
    path = Path(root) / f"iter_{rollout_id:07d}"

    def write(directory: Path) -> None:
        dist_checkpointing.save(
            _state(chunks, optimizer, loading=False), str(directory), content_metadata=dict(_METADATA)
        )
        if reference is not None:
            if dist.get_rank() == 0:
                (directory / REFERENCE).mkdir()
            dist.barrier()
            with reference():
                state = _state(chunks, None, loading=False)
                dist_checkpointing.save(state, str(directory / REFERENCE), content_metadata=dict(_METADATA))
        if dist.get_rank() == 0:
            torch.save({key: [state[key] for state in rng] for key in rng[0]}, directory / "rng.pt")
            meta = {
                "rollout_id": rollout_id,
                **asdict(progress),
                "world_size": dist.get_world_size(),
                "with_optimizer": optimizer is not None,
                "timestamp": time.time(),
            }
            (directory / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")

    write_atomically(path, write)
    if dist.get_rank() == 0:
        temporary = Path(root) / f".{TRACKER}.tmp"
        temporary.write_text(f"{rollout_id}\n")
        os.replace(temporary, Path(root) / TRACKER)
    dist.barrier()


def load_checkpoint(
    path: Path, chunks: Sequence[nn.Module], optimizer: Optimizer, with_optimizer: bool = True, with_rng: bool = True
) -> Progress:
    """Read weights, optimizer state and random states in place; collective.

    Layout and number of ranks may differ from those that saved; with another number random states are left alone.

    Raises:
        CheckpointError: it has no optimizer state where it is wanted.
    """
    meta = json.loads((path / "meta.json").read_text())
    if with_optimizer and not meta["with_optimizer"]:
        raise CheckpointError(
            f"{path} was saved without optimizer state (--no-save-optim): resume with --no-load-optim, or take only "
            "its weights with --finetune"
        )
    if with_optimizer:
        optimizer.create_moments()
        state = dist_checkpointing.load(_state(chunks, optimizer, loading=True), str(path))
        for index, chunk in enumerate(chunks):
            chunk.load_state_dict(state[f"model{index}"])
        optimizer.megatron.load_state_dict(state["optimizer"])
        optimizer.set_steps_done(meta["global_step"])
    else:
        load_weights(path, chunks)
        optimizer.megatron.reload_model_params()
    if with_rng and meta["world_size"] == dist.get_world_size():
        states = torch.load(path / "rng.pt", weights_only=True)
        set_rng_state({key: values[dist.get_rank()] for key, values in states.items()})
    dist.barrier()
    return Progress(**{key: meta[key] for key in Progress.__dataclass_fields__})


def load_weights(path: Path, chunks: Sequence[nn.Module]) -> None:
    """Read the weights alone; collective. The vocabulary's padding may differ."""
    state = dist_checkpointing.load(_state(chunks, None, loading=True), str(path))
    for index, chunk in enumerate(chunks):
        chunk.load_state_dict(state[f"model{index}"])


def load_reference(path: Path, chunks: Sequence[nn.Module]) -> bool:
    """Read the reference model saved with a checkpoint into the chunks; False, untouched, if there is none."""
    if not (path / REFERENCE).is_dir():
        return False
    load_weights(path / REFERENCE, chunks)
    return True


def _state(chunks: Sequence[nn.Module], optimizer: Optimizer | None, loading: bool) -> dict[str, Any]:
    metadata = dict(_METADATA)  # Megatron puts process groups into it
    state = {f"model{index}": chunk.sharded_state_dict(metadata=metadata) for index, chunk in enumerate(chunks)}
    if optimizer is not None:
        model = state["model0"] if len(chunks) == 1 else state
        state["optimizer"] = optimizer.megatron.sharded_state_dict(model, is_loading=loading, metadata=metadata)
    return state
