"""Checkpoints that a full disk or a kill cannot spoil, in the layout of SPEC: DCP directories, RNG, meta, tracker.

`{save}/iter_{rollout_id + 1:07d}/` holds `model/`, `optimizer/`, `rng.pt` and `meta.json`. Everything is written
under a temporary name and renamed when complete; the tracker file, which names the checkpoint to resume, comes last.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from slime.backends.fsdp_utils.lora import has_adapters
from slime.backends.fsdp_utils.model import PolicyModel
from slime.backends.fsdp_utils.optimizer import Optimizer

TRACKER = "latest_checkpointed_iteration.txt"


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message names path, cause and what is still valid."""


@dataclass
class Progress:
    """How far the run is."""

    next_rollout_id: int = 0
    global_step: int = 0
    """Optimizer steps taken: where the learning-rate schedule stands."""
    micro_step: int = 0
    """Micro-batches trained on."""
    weight_version: int = 0
    """Updates sent to the engines."""


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

    def track() -> None:
        if dist.get_rank() == 0:
            temporary = Path(root) / f".{TRACKER}.tmp"
            temporary.write_text(f"{iteration}\n")
            _sync(temporary)
            os.replace(temporary, Path(root) / TRACKER)
            _sync(Path(root))

    write_atomically(Path(root) / f"iter_{iteration:07d}", write)
    error = _agree(track)
    if error is not None:
        raise CheckpointError(f"could not write {Path(root) / TRACKER}: {error}. Earlier checkpoints are untouched.")


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


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Let all ranks `write` into a fresh directory, then rename it to `path`; collective.

    Raises:
        CheckpointError: on every rank when any failed; what was written is removed and an older `path` untouched.
    """
    directory = AtomicDirectory(path)
    directory.prepare()
    directory.run(lambda: write(directory.temporary))
    directory.publish()


class AtomicDirectory:
    """A directory that all ranks write under another name, step by step; all methods are collective.

    Raises:
        CheckpointError: on every rank when any failed; what was written is removed and an older `path` untouched.
    """

    def __init__(self, path: Path):
        self.path = path
        self.temporary = path.parent / f".{path.name}.tmp"
        self._first = dist.get_rank() == 0

    def prepare(self) -> None:
        def make() -> None:
            if self._first:
                shutil.rmtree(self.temporary, ignore_errors=True)
                self.temporary.mkdir(parents=True)

        self.run(make)

    def run(self, action: Callable[[], Any]) -> None:
        """Let every rank do its part of the writing."""
        error = _agree(action)
        if error is not None:
            if self._first:
                shutil.rmtree(self.temporary, ignore_errors=True)
            raise CheckpointError(f"could not write {self.path}: {error}. Earlier checkpoints are untouched.")

    def publish(self) -> None:
        """Make it complete and visible."""
        path = self.path

        def rename() -> None:
            if self._first:
                for file in self.temporary.rglob("*"):
                    _sync(file)
                old = path.parent / f".{path.name}.old"
                if path.exists():
                    shutil.rmtree(old, ignore_errors=True)
                    path.rename(old)
                self.temporary.rename(path)
                _sync(path.parent)
                shutil.rmtree(old, ignore_errors=True)

        self.run(rename)


def _agree(action: Callable[[], Any]) -> str | None:
    """Run `action` on every rank; the first failure of any rank, on all of them."""
    mine = None
    try:
        action()
    except (Exception, dcp.api.CheckpointException) as error:  # the latter is a BaseException
        # Whatever it is, the other ranks must hear of it before anyone raises.
        mine = f"rank {dist.get_rank()}: {_root_cause(error)}"
    failures: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, mine)
    return next((failure for failure in failures if failure), None)


def _root_cause(error: BaseException) -> str:
    """The innermost reason: DCP wraps the failures of all ranks in one exception."""
    if isinstance(error, dcp.api.CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"


def _read(state: dict[str, Any], path: Path) -> None:
    try:
        dcp.load(state, checkpoint_id=path)
    except (dcp.api.CheckpointException, RuntimeError, ValueError, OSError) as error:
        raise CheckpointError(f"could not read {path}: {_root_cause(error)}") from error


def _sync(path: Path) -> None:
    """Force a file or directory to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def model_state(policy: PolicyModel) -> dict[str, torch.Tensor]:
    """Parameters by name, sharing memory with the model. With adapters only what is trained: the base has its own."""
    parameters = policy.hf_parameters()
    adapters_only = has_adapters(parameters)
    return {name: p.detach() for name, p in parameters.items() if p.requires_grad or not adapters_only}


def rng_state() -> dict[str, Any]:
    """This process's random number generators, in types that a weights-only load accepts."""
    name, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "numpy": (name, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, cached),
        "python": random.getstate(),
    }


def set_rng_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    version, values, gauss = state["python"]
    random.setstate((version, tuple(values), gauss))
