"""The workers behind the router: their health, and which of them takes the next request.

A worker that fails is the last choice for a while. After `failure_threshold` failures in a row it is quarantined: it
gets no request until a health probe succeeds.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from bisect import bisect
from collections.abc import Collection
from dataclasses import dataclass, field

import xxhash
from yarl import URL

COOL_DOWN = 5.0
"""Seconds in which a worker that failed gets requests only when no other can."""
POINTS_PER_WORKER = 128
"""On the hash ring; the load of workers then differs by about 1 / sqrt(128)."""

_ids = itertools.count(1)


@dataclass(eq=False)
class Worker:
    """One inference server."""

    url: str
    worker_id: str = field(default_factory=lambda: f"worker-{next(_ids)}")
    in_flight: int = 0
    last_used: int = 0
    """Number of the last request it got; ties go to the one that waited longest."""
    failures: int = 0
    """Failures since the last success."""
    failed_at: float = float("-inf")
    quarantined: bool = False
    probed_at: float = float("-inf")
    attempts: set[asyncio.Task] = field(default_factory=set)
    """Requests that it is answering."""
    cut: set[asyncio.Task] = field(default_factory=set)
    """Those of them that were taken away from it."""

    @property
    def healthy(self) -> bool:
        return not self.quarantined and time.monotonic() - self.failed_at >= COOL_DOWN

    def take_requests_away(self) -> None:
        """Cancel what it is answering, to be sent to another worker."""
        for task in self.attempts:
            self.cut.add(task)
            task.cancel()

    def describe(self) -> dict:
        return {
            "id": self.worker_id,
            "url": self.url,
            "load": self.in_flight,
            "is_healthy": self.healthy,
            "quarantined": self.quarantined,
            "failures": self.failures,
        }


def normalize_url(raw: str) -> str:
    """`host:port` or a URL -> `http://host:port` without a trailing slash.

    Raises:
        ValueError: not an http address.
    """
    if not isinstance(raw, str) or not raw.strip():
        raise ValueError("a worker needs a url")
    raw = raw.strip()
    url = URL(raw if "://" in raw else f"http://{raw}")
    if url.scheme not in ("http", "https") or not url.host:
        raise ValueError(f"{raw!r} is not an http address")
    return str(url).rstrip("/")


class HashRing:
    """Consistent hashing: a key keeps its worker while that is open, and when others come or go."""

    def __init__(self, workers: Collection[Worker]) -> None:
        points = [
            (xxhash.xxh3_64_intdigest(f"{worker.url}#{i}".encode()), worker)
            for worker in workers
            for i in range(POINTS_PER_WORKER)
        ]
        points.sort(key=lambda point: point[0])
        self._hashes = [number for number, _ in points]
        self._workers = [worker for _, worker in points]

    def pick(self, key: str, among: Collection[Worker]) -> Worker | None:
        """The first worker at or after the key's place on the ring that is in `among`."""
        start = bisect(self._hashes, xxhash.xxh3_64_intdigest(key.encode()))
        order = itertools.chain(range(start, len(self._workers)), range(start))
        return next((self._workers[i] for i in order if self._workers[i] in among), None)


class WorkerPool:
    """Workers by address.

    Args:
        failure_threshold: failures in a row until a worker is quarantined.
    """

    def __init__(self, failure_threshold: int = 3) -> None:
        self.failure_threshold = failure_threshold
        self._workers: dict[str, Worker] = {}
        self._ring = HashRing(())
        self._requests = itertools.count(1)
        self._waiters: set[asyncio.Future] = set()

    def __len__(self) -> int:
        return len(self._workers)

    @property
    def workers(self) -> list[Worker]:
        return list(self._workers.values())

    def add(self, raw_url: str) -> Worker:
        """Register a worker; adding one again keeps its counts and clears its failures."""
        url = normalize_url(raw_url)
        if url not in self._workers:
            self._workers[url] = Worker(url)
            self._ring = HashRing(self.workers)
        worker = self._workers[url]
        self.succeed(worker)
        self._wake_waiters()
        return worker

    def remove(self, id_or_url: str) -> Worker | None:
        """Forget a worker; requests it is answering go on."""
        for url, worker in self._workers.items():
            if id_or_url in (worker.worker_id, url) or id_or_url.rstrip("/") == url:
                del self._workers[url]
                self._ring = HashRing(self.workers)
                return worker
        return None

    def fail(self, worker: Worker) -> bool:
        """Count a failure; True when it put the worker into quarantine."""
        worker.failures += 1
        worker.failed_at = time.monotonic()
        if worker.quarantined or worker.failures < self.failure_threshold:
            return False
        worker.quarantined = True
        return True

    def succeed(self, worker: Worker) -> bool:
        """Clear the failures; True when it ended a quarantine."""
        returned, worker.quarantined = worker.quarantined, False
        failed, worker.failures = worker.failures > 0, 0
        worker.failed_at = float("-inf")
        if failed:
            self._wake_waiters()
        return returned

    def pick(self, tried: Collection[Worker] = (), key: str | None = None) -> Worker | None:
        """A worker that is neither quarantined nor in `tried`; one that failed lately before none.

        Without `key` the one with the fewest requests in flight; with one, the key's own.
        """
        choices = [worker for worker in self._workers.values() if not worker.quarantined and worker not in tried]
        if not choices:
            return None
        if key is None:
            worker = min(choices, key=lambda w: (not w.healthy, w.in_flight, w.last_used))
        else:
            worker = self._ring.pick(key, [w for w in choices if w.healthy] or choices)
        worker.last_used = next(self._requests)
        return worker

    async def wait_for_change(self, timeout: float) -> None:
        """Return when a worker was added or recovered, or after `timeout` seconds."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(waiter, timeout)
        finally:
            self._waiters.discard(waiter)

    def _wake_waiters(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
