"""Health probes of the router: what puts a silent worker into quarantine and takes a recovered one back."""

from __future__ import annotations

import asyncio
import logging
import time

import aiohttp

from slime.router.workers import Worker, WorkerPool

logger = logging.getLogger(__name__)

TICK_SECS = 0.5
"""A worker that has failed is probed at this pace."""


class HealthProbes:
    """GET `/health` of each worker every `interval` seconds; any answer below 500 is good.

    A worker that reaches the threshold loses the requests that it is answering: it may be stopped, and would never
    answer them.
    """

    def __init__(self, pool: WorkerPool, session: aiohttp.ClientSession, interval: float, timeout: float) -> None:
        self.pool = pool
        self.session = session
        self.interval = interval
        self.timeout = aiohttp.ClientTimeout(total=timeout)
        self._running: dict[Worker, asyncio.Task] = {}

    async def run(self) -> None:
        """Probe until cancelled."""
        try:
            while True:
                for worker in self.pool.workers:
                    if worker not in self._running and self._is_due(worker):
                        task = asyncio.ensure_future(self.probe(worker))
                        self._running[worker] = task
                        task.add_done_callback(lambda _, worker=worker: self._running.pop(worker))
                await asyncio.sleep(min(TICK_SECS, self.interval))
        finally:
            for task in self._running.values():
                task.cancel()

    def _is_due(self, worker: Worker) -> bool:
        return worker.failures > 0 or time.monotonic() - worker.probed_at >= self.interval

    async def probe(self, worker: Worker) -> None:
        worker.probed_at = time.monotonic()
        try:
            async with self.session.get(worker.url + "/health", timeout=self.timeout) as reply:
                healthy, reason = reply.status < 500, f"status {reply.status}"
        except (aiohttp.ClientError, asyncio.TimeoutError) as error:
            healthy, reason = False, repr(error)
        if healthy:
            if self.pool.succeed(worker):
                logger.warning("worker %s is healthy again", worker.url)
        elif self.pool.fail(worker):
            logger.warning("worker %s is in quarantine after %d failures: %s", worker.url, worker.failures, reason)
            worker.take_requests_away()
