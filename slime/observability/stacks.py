"""What the processes of a run are doing: Python stacks on request, and their short form for a message."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import re
import signal
import sysconfig
import time
import types
from collections import Counter
from pathlib import Path

SIGNAL = signal.SIGUSR1
ANSWER_SECS = 3.0
POLL_SECS = 0.05
_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>.+)$')
_OWN = f"{os.sep}slime{os.sep}"


def dump_on_signal() -> None:
    """From now on SIGUSR1 writes the stacks of all threads to stderr, which is the process's log."""
    faulthandler.register(SIGNAL, all_threads=True)


def collect(processes: dict[str, tuple[int, Path]]) -> dict[str, str]:
    """Ask processes of this machine for their stacks, which go to their logs.

    Args:
        processes: name -> pid and log.

    Returns:
        name -> what it is doing in a few words. A process that is stopped, gone or has no handler says so.
    """
    asked: dict[str, tuple[Path, int]] = {}
    words: dict[str, str] = {}
    for name, (pid, log) in processes.items():
        if not _listens(pid):
            words[name] = _state(pid)
            continue
        asked[name] = (log, log.stat().st_size if log.exists() else 0)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, SIGNAL)
    deadline = time.monotonic() + ANSWER_SECS
    while asked and time.monotonic() < deadline:
        time.sleep(POLL_SECS)
        for name, (log, start) in list(asked.items()):
            text = _new_text(log, start)
            if "(most recent call first)" in text and text.endswith("\n"):
                words[name] = summarize(text)
                del asked[name]
    words |= dict.fromkeys(asked, "does not answer (stopped?)")
    return words


def summarize(dump: str) -> str:
    """For each thread that is inside slime: the innermost function, and the line of slime that called it."""
    threads: list[list[tuple[str, str, str]]] = []
    for line in dump.splitlines():
        if "(most recent call first)" in line:
            threads.append([])
        elif threads and (match := _FRAME.match(line)):
            threads[-1].append((match["file"], match["line"], match["function"]))
    found: list[str] = []
    for frames in threads:
        own = next((f for f in frames if _OWN in f[0]), None)
        if own is None:
            continue
        file = own[0][own[0].rindex(_OWN) + 1 :]
        text = f"{own[2]} ({file}:{own[1]})"
        inner = frames[0]
        if inner != own:
            text += f", in {inner[2]} ({os.path.basename(inner[0])}:{inner[1]})"
        if text not in found:
            found.append(text)
    return "; ".join(found) or "idle"


def describe_tasks(loop: asyncio.AbstractEventLoop, most: int = 5) -> str:
    """What the tasks of a loop wait for: `16 x generate (my_agent.py:25); 4 x ...`, the most frequent first.

    The stacks of threads do not show that. May be called from any thread.
    """
    places = Counter(filter(None, map(_waits_in, asyncio.all_tasks(loop))))
    return "; ".join(f"{count} x {place}" for place, count in places.most_common(most))


def _waits_in(task: asyncio.Task) -> str:
    """The innermost coroutine of a task that is not of Python's library."""
    place, coroutine, library = "", task.get_coro(), sysconfig.get_path("stdlib") + os.sep
    while isinstance(coroutine, types.CoroutineType) and coroutine.cr_frame is not None:
        code = coroutine.cr_code
        if not code.co_filename.startswith(library):
            place = f"{code.co_name} ({os.path.basename(code.co_filename)}:{coroutine.cr_frame.f_lineno})"
        coroutine = coroutine.cr_await
    return place


def _listens(pid: int) -> bool:
    """Whether the process has a handler: without one the signal would end it."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        caught = next(line for line in lines if line.startswith("SigCgt:"))
        return bool(int(caught.split()[1], 16) >> (SIGNAL - 1) & 1)
    return False


def _state(pid: int) -> str:
    return "no stacks of this kind of process" if os.path.exists(f"/proc/{pid}") else "gone"


def _new_text(log: Path, start: int) -> str:
    with open(log, "rb") as file:
        file.seek(start)
        return file.read().decode(errors="replace")
