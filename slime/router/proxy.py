"""One request's way through the router: to a worker, to another one when that fails, waiting when there is none."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

from slime.router.workers import Worker, WorkerPool

logger = logging.getLogger(__name__)

ROUTING_KEY = "X-SMG-Routing-Key"
"""Requests with the same value go to the same worker."""
HOP_BY_HOP = frozenset(
    ["connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailers", "transfer-encoding"]
    + ["upgrade", "host", "content-length", "content-encoding", "expect"]
)
"""Headers that belong to one connection, or that are set anew for the next."""
RETRIES_PER_WORKER = 2
"""A kept-alive connection may have just been closed by its server; the second attempt opens a new one."""
MAX_LOST_WORKERS = 5
"""A request whose workers died this often may be what kills them."""
RETRY_SECS = 0.5

# aiohttp before 3.14 keeps request data under strings.
_request_key = getattr(web, "RequestKey", lambda name, kind: name)
BODY = _request_key("slime_body", bytes)
"""Where middleware puts the body that the worker gets instead of the client's."""
HEADERS = _request_key("slime_headers", CIMultiDict)
"""Where middleware puts headers that stand in for the client's."""
ON_CHUNK = _request_key("slime_on_chunk", Callable)
"""Where middleware puts a function that sees each chunk of a streamed answer."""
SINK = _request_key("slime_sink", object)
"""Where middleware puts what a streamed answer is written to instead of the client, with StreamSink's methods."""


class WorkerLost(ConnectionError):
    """The worker was taken out of service while it was answering."""


class NotReady(ConnectionError):
    """The worker answered 503: it is starting."""


FAILURES = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, WorkerLost, NotReady)


class Proxy:
    """Sends requests to the workers of a pool.

    Args:
        session: its connections.
        request_timeout: seconds that one worker may take for one request.
        queue_timeout: seconds that a request waits for a worker when there is none to take it.
    """

    def __init__(
        self, pool: WorkerPool, session: aiohttp.ClientSession, request_timeout: float, queue_timeout: float
    ) -> None:
        self.pool = pool
        self.session = session
        self.request_timeout = request_timeout
        self.queue_timeout = queue_timeout

    async def forward(self, request: web.Request) -> web.StreamResponse:
        """The answer of a worker, or an error of the router itself: 502, 503, 504."""
        body = request[BODY] if BODY in request else await request.read()
        key = request.get(HEADERS, request.headers).get(ROUTING_KEY)
        loop = asyncio.get_running_loop()
        tried: list[Worker] = []
        failure: Exception | None = None
        lost, deadline = 0, None
        while lost < MAX_LOST_WORKERS:
            worker = self.pool.pick(tried, key)
            if worker is None:
                deadline = deadline or loop.time() + self.queue_timeout
                if loop.time() >= deadline:
                    break
                await self.pool.wait_for_change(min(RETRY_SECS, deadline - loop.time()) if tried else RETRY_SECS)
                tried = []
                continue
            try:
                return await self._try(worker, request, body)
            except FAILURES as error:
                failure = error
                lost += not isinstance(error, (aiohttp.ClientConnectorError, NotReady))
                tried.append(worker)
            except asyncio.TimeoutError:
                return error_response(504, f"{worker.url} did not answer within {self.request_timeout:g} s")
        if failure is None:
            what = "all workers are in quarantine" if len(self.pool) else "no worker is registered"
            return error_response(503, what, code="no_available_workers")
        return error_response(502, f"no worker could answer; the last failure: {failure!r}", code="workers_failed")

    async def _try(self, worker: Worker, request: web.Request, body: bytes) -> web.StreamResponse:
        attempts = 0
        while True:
            attempts += 1
            answer = _Answer(request)
            try:
                response = await self._attempt(worker, request, body, answer)
                self.pool.succeed(worker)
                return response
            except FAILURES as error:
                logger.warning("%s %s at %s: %r", request.method, request.path, worker.url, error)
                if not isinstance(error, WorkerLost):
                    self.pool.fail(worker)
                if answer.started:
                    # The client has part of a stream: cut it, so that it sees the failure.
                    if request.transport is not None:
                        request.transport.close()
                    raise
                final = isinstance(error, (aiohttp.ClientConnectorError, WorkerLost, NotReady))
                if final or attempts == RETRIES_PER_WORKER or worker.quarantined:
                    raise

    async def _attempt(self, worker: Worker, request: web.Request, body: bytes, answer: _Answer) -> web.StreamResponse:
        task = asyncio.ensure_future(self._send(worker, request, body, answer))
        worker.attempts.add(task)
        worker.in_flight += 1
        try:
            return await task
        except asyncio.CancelledError:
            if task in worker.cut:
                raise WorkerLost(f"{worker.url} was taken out of service") from None
            raise
        finally:
            worker.in_flight -= 1
            worker.attempts.discard(task)
            worker.cut.discard(task)

    async def _send(self, worker: Worker, request: web.Request, body: bytes, answer: _Answer) -> web.StreamResponse:
        given = request.get(HEADERS, request.headers)
        headers = CIMultiDict((k, v) for k, v in given.items() if k.lower() not in HOP_BY_HOP)
        async with self.session.request(
            request.method, worker.url + request.raw_path, data=body or None, headers=headers, allow_redirects=False
        ) as reply:
            if reply.status == 503:
                raise NotReady(f"{worker.url} answered 503: {(await reply.text())[:200]}")
            if reply.content_type == "text/event-stream":
                return await answer.stream(reply)
            return web.Response(body=await reply.read(), status=reply.status, headers=_passed_on(reply))


class StreamSink:
    """Writes a streamed answer to the client."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._response: web.StreamResponse | None = None

    async def start(self, status: int, headers: CIMultiDict) -> None:
        self._response = web.StreamResponse(status=status, headers=headers)
        await self._response.prepare(self._request)

    async def write(self, chunk: bytes) -> None:
        await self._response.write(chunk)

    async def finish(self) -> web.StreamResponse:
        await self._response.write_eof()
        return self._response


class _Answer:
    """A streamed reply on its way to the client."""

    def __init__(self, request: web.Request) -> None:
        self.request = request
        self.started = False

    async def stream(self, reply: aiohttp.ClientResponse) -> web.StreamResponse:
        sink = self.request.get(SINK) or StreamSink(self.request)
        await sink.start(reply.status, _passed_on(reply))
        self.started = True
        on_chunk: Callable[[bytes], None] | None = self.request.get(ON_CHUNK)
        async for chunk in reply.content.iter_any():
            if on_chunk is not None:
                on_chunk(chunk)
            await sink.write(chunk)
        return await sink.finish()


def is_event_stream(headers: CIMultiDict) -> bool:
    return headers.get("Content-Type", "").partition(";")[0].strip().lower() == "text/event-stream"


def _passed_on(reply: aiohttp.ClientResponse) -> CIMultiDict:
    kept = CIMultiDict((k, v) for k, v in reply.headers.items() if k.lower() not in HOP_BY_HOP)
    if "Content-Encoding" in reply.headers:
        kept["Content-Encoding"] = reply.headers["Content-Encoding"]
    return kept


def error_response(status: int, message: str, code: str | None = None) -> web.Response:
    return web.Response(status=status, text=error_body(message, code), content_type="application/json")


def error_body(message: str, code: str | None = None) -> str:
    error: dict[str, Any] = {"message": message}
    return json.dumps({"error": {**error, "code": code} if code else error})
