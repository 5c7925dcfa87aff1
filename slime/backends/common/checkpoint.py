"""What the checkpoints of both trainers share: progress, random states, files that are complete or not there."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

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
        error = _agree(action, self.path.parent)
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


def write_tracker(root: Path, number: int) -> None:
    """Let the tracker file name `iter_{number}`; collective.

    Raises:
        CheckpointError: on every rank when it could not be written.
    """

    def write() -> None:
        if dist.get_rank() == 0:
            temporary = root / f".{TRACKER}.tmp"
            temporary.write_text(f"{number}\n")
            _sync(temporary)
            os.replace(temporary, root / TRACKER)
            _sync(root)

    error = _agree(write, root)
    if error is not None:
        raise CheckpointError(f"could not write {root / TRACKER}: {error}. Earlier checkpoints are untouched.")


def _agree(action: Callable[[], Any], root: Path) -> str | None:
    """Run `action`, which writes below `root`, on every rank; the first failure of any rank, on all of them."""
    mine = None
    try:
        action()
    except (Exception, dcp.api.CheckpointException) as error:  # the latter is a BaseException
        # Whatever it is, the other ranks must hear of it before anyone raises.
        mine = f"rank {dist.get_rank()}: {root_cause(error)} ({_free(root)} free there)"
    failures: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, mine)
    return next((failure for failure in failures if failure), None)


def _free(root: Path) -> str:
    """Torch's writers do not say that a disk is full."""
    try:
        return f"{shutil.disk_usage(root).free / 1e6:,.1f} MB"
    except OSError:
        return "unknown"


def root_cause(error: BaseException) -> str:
    """The innermost reason: DCP wraps the failures of all ranks in one exception."""
    if isinstance(error, dcp.api.CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"


def _sync(path: Path) -> None:
    """Force a file or directory to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
