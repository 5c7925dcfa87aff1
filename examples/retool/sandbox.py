"""Runs a model's Python code in a process that can compute and print, and nothing else.

The kernel holds the walls, not a list of forbidden words: before the code runs, the process gives up every system call
but those of computing, memory, time and the pipes it already has (seccomp). It cannot open a file, make a socket,
start a process or signal one. Limits on CPU time, memory, output and wall time end what runs away.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

CHILD = Path(__file__).with_name("sandbox_child.py")
START_SECONDS = 20.0
"""For the interpreter to start and import what code may use; counted apart from the code's own time."""


@dataclass(frozen=True)
class Limits:
    cpu_seconds: int = 2
    wall_seconds: float = 5.0
    memory_bytes: int = 512 * 1024**2
    output_bytes: int = 4096


@dataclass(frozen=True)
class Result:
    output: str
    """What the code printed, and the last line of its traceback if it failed; at most `Limits.output_bytes`."""
    status: str
    """"ok", "error" (an exception), "timeout", "killed" (a limit of the kernel) or "output" (too much of it)."""


class SandboxUnavailable(RuntimeError):
    """This machine cannot confine a process; code is never run without."""


async def run_python(code: str, limits: Limits = Limits()) -> Result:
    """Run `code`; returns within about `limits.wall_seconds`.

    Raises:
        SandboxUnavailable: not Linux on x86_64 or aarch64, or seccomp is off.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        _forks.start(theirs, limits)
    reader, writer = await asyncio.open_connection(sock=ours)
    try:
        return await _talk(reader, writer, code, limits)
    finally:
        writer.close()


async def _talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, code: str, limits: Limits) -> Result:
    ready, _, pid = (await asyncio.wait_for(reader.readline(), START_SECONDS)).decode(errors="replace").partition(" ")
    if ready != "ready":
        raise SandboxUnavailable(f"the sandbox did not start: {ready} {pid}".rstrip())
    # It waits for the code now, so that this is surely its process, whatever becomes of its number.
    process = os.pidfd_open(int(pid))
    received = bytearray()
    try:
        writer.write(code.encode())
        writer.write_eof()
        status = await asyncio.wait_for(_read(reader, received, limits.output_bytes), limits.wall_seconds)
    except asyncio.TimeoutError:
        status = "timeout"
    finally:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, signal.SIGKILL)
        os.close(process)
    return Result(received[: limits.output_bytes].decode(errors="replace"), status)


async def _read(reader: asyncio.StreamReader, received: bytearray, limit: int) -> str:
    """Collect the output; returns the status."""
    with contextlib.suppress(ConnectionResetError):  # it ended before it had read all of the code
        while chunk := await reader.read(65536):
            received.extend(chunk)
            if len(received) > limit + len(b"\0error"):
                return "output"
    for status in ("ok", "error"):
        mark = b"\0" + status.encode()
        if received.endswith(mark):
            del received[-len(mark) :]
            return status
    return "killed"


class _Forks:
    """The process that forks for every piece of code. It ends with this one, and is started again if it was killed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen | None = None

    def start(self, connection: socket.socket, limits: Limits) -> None:
        message = f"{limits.cpu_seconds} {limits.memory_bytes}".encode()
        with self._lock:
            if self._control is not None:
                with contextlib.suppress(ConnectionError):  # it was killed
                    socket.send_fds(self._control, [message], [connection.fileno()])
                    return
                self._process.wait()
            self._process, self._control = _spawn()
            socket.send_fds(self._control, [message], [connection.fileno()])


def _spawn() -> tuple[subprocess.Popen, socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(CHILD), str(theirs.fileno())],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()], cwd="/", env={"LC_ALL": "C.UTF-8"}, start_new_session=True,
        )  # fmt: skip
    return process, ours


_forks = _Forks()
