"""Wall-clock time per named phase, collected under the metric names `perf/{name}_time`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Timer:
    """Collects seconds per name; a name used twice adds up, and phases may nest.

    >>> timer = Timer()
    >>> with timer("train"):
    ...     with timer("log_probs"):
    ...         pass
    >>> sorted(timer.pop())
    ['perf/log_probs_time', 'perf/train_time']
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - start)

    def add(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def pop(self) -> dict[str, float]:
        """`{"perf/{name}_time": seconds}` since the last call."""
        out = {f"perf/{name}_time": seconds for name, seconds in self._seconds.items()}
        self._seconds = {}
        return out
