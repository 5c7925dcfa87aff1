"""`--record-memory-history`: which code of a trainer allocated what, on the GPU (torch) or in host memory (memray)."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

HISTORY_ENTRIES = 200_000


class MemoryHistory:
    """Of one trainer process, from now on. This one records nothing.

    Args:
        name: of the process, in the names of files.
    """

    def __init__(self, args: Namespace, name: str) -> None:
        self.name = name
        self.directory = Path(args.memory_snapshot_dir)
        self._left = args.memory_snapshot_num_steps

    @contextmanager
    def watch(self, rollout_id: int) -> Iterator[None]:
        """Around the training of a rollout; after `--memory-snapshot-num-steps` of them what is known is written."""
        try:
            yield
        except (torch.OutOfMemoryError, MemoryError):
            self._write(f"out-of-memory-rollout-{rollout_id}")
            raise
        if self._left is not None:
            self._left -= 1
            if self._left == 0:
                self._write(f"rollout-{rollout_id}")

    def _write(self, event: str) -> None:
        pass

    def close(self) -> None:
        """The process ends."""


class DeviceHistory(MemoryHistory):
    """Allocations on the GPU, in snapshots for https://pytorch.org/memory_viz."""

    def __init__(self, args: Namespace, name: str) -> None:
        super().__init__(args, name)
        torch.cuda.memory._record_memory_history(max_entries=HISTORY_ENTRIES)

    def _write(self, event: str) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / f"memory-{event}-{self.name}.pickle"
        torch.cuda.memory._dump_snapshot(str(path))
        logger.info("wrote %s: open it at https://pytorch.org/memory_viz", path)


class HostHistory(MemoryHistory):
    """Allocations in host memory, streamed to one file for `memray flamegraph`, `memray table`, ..."""

    def __init__(self, args: Namespace, name: str) -> None:
        import memray

        super().__init__(args, name)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._path = self.directory / f"memory-{name}.memray"
        self._tracker: memray.Tracker | None = memray.Tracker(
            destination=memray.FileDestination(self._path, overwrite=True)
        )
        self._tracker.__enter__()

    def _write(self, event: str) -> None:
        if self._tracker is not None:
            self._tracker.__exit__(None, None, None)
            self._tracker = None
            logger.info("wrote %s (until %s): memray flamegraph %s", self._path, event, self._path)

    def close(self) -> None:
        self._write("the end")


def memory_history(args: Namespace, name: str) -> MemoryHistory:
    """What `--record-memory-history` and `--memory-recorder` ask for."""
    if not args.record_memory_history:
        return MemoryHistory(args, name)
    return {"torch": DeviceHistory, "memray": HostHistory}[args.memory_recorder](args, name)
