"""Running coroutines from synchronous code, and waiting for processes, without polling sleeps."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import psutil


class _LoopThread:
    """One daemon thread with a running event loop: sessions and semaphores live on it across calls."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="slime-async", daemon=True)
        self.thread.start()


_lock = threading.Lock()
_current: _LoopThread | None = None


def _loop_thread() -> _LoopThread:
    global _current
    with _lock:
        if _current is None or _current.pid != os.getpid() or not _current.thread.is_alive():
            _current = _LoopThread()
        return _current


def run(coroutine: Coroutine, watchdog: Callable[[], None] | None = None, interval: float = 1.0) -> Any:
    """Run a coroutine on the process's persistent loop thread and return its result.

    Args:
        watchdog: called every `interval` seconds from the calling thread. An exception it raises ends the wait, which
            is the only way out when user code blocks the loop itself.

    Raises:
        RuntimeError: called on the loop thread itself, where waiting would deadlock.
    """
    runner = _loop_thread()
    if threading.current_thread() is runner.thread:
        coroutine.close()
        raise RuntimeError("async_utils.run was called from a coroutine that it is running: await instead")
    future = asyncio.run_coroutine_threadsafe(coroutine, runner.loop)
    try:
        while True:
            try:
                return future.result(timeout=interval if watchdog else None)
            except concurrent.futures.TimeoutError:
                if future.done():
                    return future.result()
                watchdog()
    except BaseException:
        if not future.done():
            future.cancel()
            _abandon_if_blocked(runner)
        raise


def running_loop() -> asyncio.AbstractEventLoop | None:
    """The loop of `run` in this process, once it was used."""
    return None if _current is None or _current.pid != os.getpid() else _current.loop


def _abandon_if_blocked(runner: _LoopThread, patience: float = 2.0) -> None:
    """Start the next `run` on a fresh loop when this one no longer answers (blocked by user code)."""
    global _current
    answered = threading.Event()
    runner.loop.call_soon_threadsafe(answered.set)
    if not answered.wait(patience):
        with _lock:
            if _current is runner:
                _current = None


async def wait_for_exit(pid: int) -> None:
    """Return when the process is gone (or a zombie)."""
    if hasattr(os, "pidfd_open"):
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        except OSError:
            fd = None
        if fd is not None:
            gone = asyncio.Event()
            loop = asyncio.get_running_loop()
            loop.add_reader(fd, gone.set)
            try:
                await gone.wait()
            finally:
                loop.remove_reader(fd)
                os.close(fd)
            return
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            await asyncio.sleep(1.0)
