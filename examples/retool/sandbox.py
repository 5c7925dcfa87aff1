"""Runs a model's Python code in a process that can compute and print, and nothing else.

The kernel holds the walls, not a list of forbidden words: before the code runs, the process gives up every system call
but those of computing, memory, time and the pipes it already has (seccomp). It cannot open a file, make a socket,
start a process or signal one. Limits on CPU time, memory, output and wall time end what runs away.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
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
    with tempfile.TemporaryDirectory(prefix="sandbox-") as empty:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", str(CHILD), str(limits.cpu_seconds), str(limits.memory_bytes),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
            cwd=empty, env={"LC_ALL": "C.UTF-8"}, start_new_session=True,
        )  # fmt: skip
        try:
            return await _talk(process, code, limits)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            while await process.stdout.read(65536):
                pass  # asyncio sees the end of a process only after the end of its output
            await process.wait()


async def _talk(process: asyncio.subprocess.Process, code: str, limits: Limits) -> Result:
    ready = await asyncio.wait_for(process.stdout.readline(), START_SECONDS)
    if ready.strip() != b"ready":
        raise SandboxUnavailable(f"the sandbox did not start: {ready.decode(errors='replace').strip() or 'no answer'}")
    process.stdin.write(code.encode())
    process.stdin.close()
    received = bytearray()

    async def read() -> str:
        while chunk := await process.stdout.read(65536):
            received.extend(chunk)
            if len(received) > limits.output_bytes:
                return "output"
        code = await process.wait()
        return {0: "ok", 1: "error"}.get(code, "killed")

    try:
        status = await asyncio.wait_for(read(), limits.wall_seconds)
    except asyncio.TimeoutError:
        status = "timeout"
    return Result(received[: limits.output_bytes].decode(errors="replace"), status)
