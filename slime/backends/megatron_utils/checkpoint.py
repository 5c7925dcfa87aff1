"""Checkpoints in Megatron's torch_dist format, readable in any layout of ranks.

`{save}/iter_{rollout_id:07d}/` holds Megatron's files, `rng.pt` and `meta.json`. Everything is written under a
temporary name and renamed when complete; the tracker file, which names the checkpoint to resume, comes last.
"""

from __future__ import annotations

import json
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

from slime.backends.common.checkpoint import (
    TRACKER,
    AtomicDirectory,
    CheckpointError,
    Progress,
    rng_state,
    set_rng_state,
    write_tracker,
)
from slime.backends.megatron_utils import compat
from slime.backends.megatron_utils.architecture import Architecture
from slime.backends.megatron_utils.async_save import BackgroundSave
from slime.backends.megatron_utils.optimizer import Optimizer
from slime.utils.checkpoint_files import is_hf_directory

# Optimizer state in the order of the model's own tensors, so that any layout can read it.
_METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}

RELEASE = "release"
"""Megatron's name, in tracker and directory, for weights that no training step has touched."""
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
    if not (text.isdigit() or text == RELEASE):
        raise CheckpointError(f"{Path(root) / TRACKER} should hold a rollout id, not {text!r}")
    path = Path(root) / (text if text == RELEASE else f"iter_{int(text):07d}")
    for candidate in (path, path.with_name(f".{path.name}.old")):  # the second: killed while it was being replaced
        if is_torch_dist(candidate):
            return candidate
    raise CheckpointError(f"iteration {text} of {root} is wanted, but {path} is not a checkpoint")


def save_checkpoint(
    root: str,
    rollout_id: int,
    chunks: Sequence[nn.Module],
    optimizer: Optimizer | None,
    progress: Progress,
    reference: Callable[[], AbstractContextManager] | None = None,
    background: BackgroundSave | None = None,
    strategy: Any = None,
) -> None:
    """Write the checkpoint of `rollout_id`; collective over all ranks.

    Args:
        chunks: model chunks, unwrapped.
        optimizer: None saves weights only.
        reference: a context in which the chunks hold the reference model's weights, to save them, too.
        background: what goes on writing after this returns. None: all is written when this returns.
        strategy: Megatron's way to write tensors; None is its default.

    Raises:
        CheckpointError: on every rank when one fails (disk full, ...). The previous checkpoint stays valid.
    """
    rng = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(rng_state(), rng, dst=0)
    path = Path(root) / f"iter_{rollout_id:07d}"

    directory = AtomicDirectory(path)
    temporary = directory.temporary

    def write_beside() -> None:
        """All but weights and optimizer."""
        if reference is not None:
            if dist.get_rank() == 0:
                (temporary / REFERENCE).mkdir()
            dist.barrier()
            with reference():
                state = _state(chunks, None, loading=False)
                dist_checkpointing.save(state, str(temporary / REFERENCE), content_metadata=dict(_METADATA))
        if dist.get_rank() == 0:
            torch.save({key: [state[key] for state in rng] for key in rng[0]}, temporary / "rng.pt")
            meta = {
                "rollout_id": rollout_id,
                **asdict(progress),
                "world_size": dist.get_world_size(),
                "with_optimizer": optimizer is not None,
                "timestamp": time.time(),
            }
            (temporary / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")

    requests = []

    def write() -> None:
        request = dist_checkpointing.save(
            _state(chunks, optimizer, loading=False),
            str(temporary),
            strategy,
            content_metadata=dict(_METADATA),
            async_sharded_save=background is not None,
            **compat.async_save_options(),
        )
        requests.append(request)

    def publish() -> None:
        directory.publish()
        write_tracker(Path(root), rollout_id)

    if background is not None:
        background.finish()
    directory.prepare()
    directory.run(write)
    directory.run(write_beside)
    if background is None:
        publish()
    else:
        background.start(requests[0], directory, publish)


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


def load_model(chunks: Sequence[nn.Module], architecture: Architecture, path: str, step: int | None = None) -> None:
    """Fill the model from a Hugging Face directory, or with the weights of a torch_dist checkpoint; collective.

    Args:
        path: for torch_dist the directory with the tracker file, or that of one iteration.
        step: iteration to take instead of the tracker's.

    Raises:
        CheckpointError: `path` is neither.
    """
    from slime.backends.megatron_utils.weights import load_hf

    if is_hf_directory(path):
        load_hf(chunks, architecture, path)
        return
    found = Path(path) if is_torch_dist(Path(path)) else latest_checkpoint(path, step)
    if found is None:
        raise CheckpointError(f"{path} is neither a Hugging Face directory nor a torch_dist checkpoint")
    load_weights(found, chunks)


def is_torch_dist(path: Path) -> bool:
    """Whether Megatron's files of one iteration lie in `path`."""
    return (path / "metadata.json").is_file()


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
