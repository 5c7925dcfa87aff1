"""Checkpoints that a full disk or a kill cannot spoil, in the layout of SPEC: DCP directories, RNG, meta, tracker.

`{save}/iter_{rollout_id + 1:07d}/` holds `model/`, `optimizer/`, `rng.pt` and `meta.json`. Everything is written
under a temporary name and renamed when complete; the tracker file, which names the checkpoint to resume, comes last.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from slime.backends.common.checkpoint import (
    TRACKER,
    CheckpointError,
    Progress,
    rng_state,
    root_cause,
    set_rng_state,
    write_atomically,
    write_tracker,
)
from slime.backends.fsdp_utils.lora import has_adapters
from slime.backends.fsdp_utils.model import PolicyModel
from slime.backends.fsdp_utils.optimizer import Optimizer


@dataclass(frozen=True)
class Extras:
    """What some runs keep beside weights and optimizer."""

    reference: Callable[[], AbstractContextManager] | None = None
    """A context in which the model holds the weights of a reference that moves."""
    adapter: Callable[[Path], None] | None = None
    """Writes adapters in peft's format; collective."""


def latest_checkpoint(root: str | None, step: int | None = None) -> Path | None:
    """The directory that the tracker in `root` names, or that of iteration `step`; None when there is no tracker.

    Raises:
        CheckpointError: the tracker is unreadable or names a directory that is not there.
    """
    if root is None or not (Path(root) / TRACKER).is_file():
        return None
    text = (Path(root) / TRACKER).read_text().strip() if step is None else str(step)
    if not text.isdigit():
        raise CheckpointError(f"{Path(root) / TRACKER} should hold an iteration number, not {text!r}")
    path = Path(root) / f"iter_{int(text):07d}"
    for candidate in (path, path.with_name(f".{path.name}.old")):  # the second: killed while it was being replaced
        if (candidate / "meta.json").is_file():
            return candidate
    wanted = f"{Path(root) / TRACKER} names" if step is None else "the run resumes"
    raise CheckpointError(f"{wanted} iteration {text}, but {path} is not a checkpoint")


def save_checkpoint(
    root: str,
    rollout_id: int,
    policy: PolicyModel,
    optimizer: Optimizer | None,
    progress: Progress,
    extras: Extras | None = None,
) -> None:
    """Write the checkpoint of `rollout_id`; collective over all ranks.

    Args:
        optimizer: None saves weights only.
    Raises:
        CheckpointError: on every rank when one fails (disk full, ...). The previous checkpoint stays valid.
    """
    iteration = rollout_id + 1
    extras = extras or Extras()
    rng = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(rng_state(), rng, dst=0)

    def write(path: Path) -> None:
        dcp.save({"model_state": {"model": model_state(policy)}}, checkpoint_id=path / "model")
        if extras.adapter is not None:
            extras.adapter(path / "adapter")
        if extras.reference is not None:
            with extras.reference():
                dcp.save({"model_state": {"model": model_state(policy)}}, checkpoint_id=path / "reference")
        if optimizer is not None:
            state = {"optim_state": {"optim": {"state": optimizer.state_by_name()}}}
            dcp.save(state, checkpoint_id=path / "optimizer")
        if dist.get_rank() == 0:
            torch.save({key: [state[key] for state in rng] for key in rng[0]}, path / "rng.pt")
            meta = {
                "iteration": iteration,
                "rollout_id": rollout_id,
                **asdict(progress),
                "world_size": dist.get_world_size(),
                "timestamp": time.time(),
            }
            (path / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")

    write_atomically(Path(root) / f"iter_{iteration:07d}", write)
    write_tracker(Path(root), iteration)


def load_checkpoint(path: Path, policy: PolicyModel, optimizer: Optimizer | None, with_rng: bool = True) -> Progress:
    """Read weights, optimizer (if there is one and the checkpoint has it) and RNG in place; collective.

    The number of ranks may differ from the one that saved; RNG states are then left alone.

    Raises:
        CheckpointError: the checkpoint does not fit the model, or has no optimizer state where it is wanted.
    """
    meta = json.loads((path / "meta.json").read_text())
    _read({"model_state": {"model": model_state(policy)}}, path / "model")
    policy.free_unsharded()
    if optimizer is not None:
        if not (path / "optimizer").is_dir():
            raise CheckpointError(
                f"{path} was saved without optimizer state (--no-save-optim): resume with --no-load-optim, or take "
                "only its weights with --finetune"
            )
        _read({"optim_state": {"optim": {"state": optimizer.state_by_name()}}}, path / "optimizer")
        optimizer.steps_done = meta["global_step"]
    if with_rng and meta["world_size"] == dist.get_world_size():
        states = torch.load(path / "rng.pt", weights_only=True)
        set_rng_state({key: values[dist.get_rank()] for key, values in states.items()})
    dist.barrier()
    return Progress(**{key: meta[key] for key in Progress.__dataclass_fields__})


def read_reference(path: Path, policy: PolicyModel) -> bool:
    """Read the reference that was saved with a checkpoint into the model, if there is one; collective."""
    if not (path / "reference").is_dir():
        return False
    _read({"model_state": {"model": model_state(policy)}}, path / "reference")
    policy.free_unsharded()
    return True


def _read(state: dict[str, Any], path: Path) -> None:
    try:
        dcp.load(state, checkpoint_id=path)
    except (dcp.api.CheckpointException, RuntimeError, ValueError, OSError) as error:
        raise CheckpointError(f"could not read {path}: {root_cause(error)}") from error


def model_state(policy: PolicyModel) -> dict[str, torch.Tensor]:
    """Parameters by name, sharing memory with the model. With adapters only what is trained: the base has its own."""
    parameters = policy.hf_parameters()
    adapters_only = has_adapters(parameters)
    return {name: p.detach() for name, p in parameters.items() if p.requires_grad or not adapters_only}
