"""The workers behind the router and which of them takes the next request."""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection
from dataclasses import dataclass, field

from yarl import URL

COOL_DOWN = 5.0
"""Seconds in which a worker that failed gets requests only when no other can."""

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

    def fail(self) -> None:
        self.failures += 1
        self.failed_at = time.monotonic()

    def succeed(self) -> None:
        self.failures = 0
        self.failed_at = float("-inf")

    @property
    def healthy(self) -> bool:
        return time.monotonic() - self.failed_at >= COOL_DOWN

    def describe(self) -> dict:
        return {
            "id": self.worker_id,
            "url": self.url,
            "load": self.in_flight,
            "is_healthy": self.healthy,
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


class WorkerPool:
    """Workers by address. The policy is least loaded."""

    def __init__(self) -> None:
        self._workers: dict[str, Worker] = {}
        self._requests = itertools.count(1)

    def __len__(self) -> int:
        return len(self._workers)

    @property
    def workers(self) -> list[Worker]:
        return list(self._workers.values())

    def add(self, raw_url: str) -> Worker:
        """Register a worker; adding one again keeps its counts and clears its failures."""
        url = normalize_url(raw_url)
        worker = self._workers.setdefault(url, Worker(url))
        worker.succeed()
        return worker

    def remove(self, id_or_url: str) -> Worker | None:
        """Forget a worker; requests it is answering go on."""
        for url, worker in self._workers.items():
            if id_or_url in (worker.worker_id, url) or id_or_url.rstrip("/") == url:
                return self._workers.pop(url)
        return None

    def pick(self, tried: Collection[Worker] = ()) -> Worker | None:
        """The healthy worker with the fewest requests in flight, not among `tried`; a failed one before none."""
        open_workers = [worker for worker in self._workers.values() if worker not in tried]
        if not open_workers:
            return None
        worker = min(open_workers, key=lambda w: (not w.healthy, w.in_flight, w.last_used))
        worker.last_used = next(self._requests)
        return worker
