"""The directory of a privately started Ray: its own per run, removed with the run, or by the next one after a kill.

A lock that the kernel drops with the process says whether the run is alive; process ids would lie across containers.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import IO

PREFIX = "slime-ray-"
# Not TMPDIR: the paths of Ray's sockets must stay below 108 characters.
PARENT = Path("/tmp")


class RayTempDir:
    """Made on construction, together with the removal of what killed runs of this user have left behind."""

    def __init__(self, parent: Path = PARENT) -> None:
        for stale in parent.glob(PREFIX + "*"):
            _remove_if_dead(stale)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        self._lock = open(self.path / "lock", "w")  # noqa: SIM115 (held until remove)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def _remove_if_dead(path: Path) -> None:
    try:
        if path.stat().st_uid != os.getuid():
            return
        with open(path / "lock") as lock:
            if _is_free(lock):
                shutil.rmtree(path, ignore_errors=True)
    except FileNotFoundError:  # it has just been made, or just been removed
        return


def _is_free(lock: IO) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
