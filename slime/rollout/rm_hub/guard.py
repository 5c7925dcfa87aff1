"""Time limits on reward functions that users wrote, including those that block the event loop.

A coroutine that awaits is cancelled when its time is up. One that computes or sleeps without awaiting stops the whole
loop, so the thread that waits for the rollout looks at the clock too (`raise_if_overdue`).
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from slime.rollout.errors import RewardError, RolloutError
from slime.utils.misc import accepted, failure
from slime.utils.types import Sample

GRACE = 3.0
"""Seconds that the loop has to end an overdue call itself."""

_calls: dict[int, tuple[float, Sample | list, str, float]] = {}
_ids = itertools.count()


async def call_reward_function(
    args, function: Callable, path: str, samples: Sample | list[Sample], kwargs: dict[str, Any]
) -> Any:
    """Call `function(args, samples, **kwargs)`, sync or async, within `--rm-timeout-secs`.

    Raises:
        RewardError: it raised or took too long.
    """
    limit = args.rm_timeout_secs
    call_id = next(_ids)
    _calls[call_id] = (time.monotonic() + limit + GRACE, samples, path, limit)
    task = asyncio.ensure_future(_call(args, function, samples, kwargs))
    try:
        done, _ = await asyncio.wait({task}, timeout=limit)
        if not done:
            raise RewardError.about(samples, path, f"took longer than --rm-timeout-secs {limit:g}")
        return task.result()
    except RolloutError:
        raise
    except Exception as error:
        raise RewardError.about(samples, path, f"raised {failure(error)}") from error
    finally:
        task.cancel()
        _calls.pop(call_id, None)


async def _call(args, function: Callable, samples: Sample | list[Sample], kwargs: dict[str, Any]) -> Any:
    kwargs = accepted(function, **kwargs)
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        return await function(args, samples, **kwargs)
    result = await in_daemon_thread(lambda: function(args, samples, **kwargs))
    return await result if inspect.isawaitable(result) else result


async def in_daemon_thread(function: Callable[[], Any]) -> Any:
    """Run a blocking function in a thread of its own that never keeps the process alive."""
    loop = asyncio.get_running_loop()
    future = loop.create_future()

    def deliver(method: Callable, value: Any) -> None:
        if not future.done():
            method(value)

    def work() -> None:
        try:
            outcome = (future.set_result, function())
        except BaseException as error:
            outcome = (future.set_exception, error)
        if not loop.is_closed():
            loop.call_soon_threadsafe(deliver, *outcome)

    threading.Thread(target=work, name="slime-reward", daemon=True).start()
    return await future


def raise_if_overdue() -> None:
    """Raise for a reward call that outlived its limit although the loop should have ended it.

    Every call that is open then is overdue; the one to blame is the one that some thread's stack stands in.

    Raises:
        RewardError: naming sample and function.
    """
    now = time.monotonic()
    calls = list(_calls.values())
    overdue = [call for call in calls if now > call[0]]
    if not overdue:
        return
    running = _running_samples()
    _, samples, path, limit = next((call for call in calls if id(call[1]) in running), overdue[0])
    _calls.clear()  # the rollout ends with this error, and the others' calls with it
    raise RewardError.about(
        samples, path, f"took longer than --rm-timeout-secs {limit:g} and blocks the event loop (no await)"
    )


def _running_samples() -> set[int]:
    """ids of the `samples` of reward calls that are executing, rather than waiting, in any thread."""
    running = set()
    for frame in sys._current_frames().values():
        while frame is not None:
            if frame.f_code is _call.__code__:
                running.add(id(frame.f_locals["samples"]))
            frame = frame.f_back
    return running
