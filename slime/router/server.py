"""slime's router: a least-loaded HTTP proxy in front of the inference servers.

    python -m slime.router.server --port 0 --port-file FILE

Requests go to the worker with the fewest in flight. When a worker dies before it has answered, its request goes to
another one. A client that hangs up takes its request at the worker with it. Engines are controlled (weights, memory,
abort) directly, never through here.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import signal

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

from slime.router.workers import Worker, WorkerPool
from slime.utils.async_utils import wait_for_exit
from slime.utils.logging_utils import configure_logging
from slime.utils.misc import atomic_write

logger = logging.getLogger(__name__)

HOP_BY_HOP = frozenset(
    ["connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailers", "transfer-encoding"]
    + ["upgrade", "host", "content-length", "content-encoding", "expect"]
)
"""Headers that belong to one connection, or that are set anew for the next."""
MAX_BODY = 4 << 30
RETRIES_PER_WORKER = 2
"""A kept-alive connection may have just been closed by its server; the second attempt opens a new one."""


class Router:
    """The HTTP application."""

    def __init__(self, request_timeout: float = 14400.0, max_connections: int = 0) -> None:
        self.pool = WorkerPool()
        self.request_timeout = request_timeout
        self.max_connections = max_connections
        self.session: aiohttp.ClientSession | None = None

    def app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY)
        app.cleanup_ctx.append(self._client)
        app.add_routes(
            [
                web.get("/health", self.health),
                web.get("/readiness", self.readiness),
                web.post("/add_worker", self.add_worker),
                web.post("/remove_worker", self.remove_worker),
                web.get("/list_workers", self.list_workers),
                web.post("/workers", self.create_worker),
                web.get("/workers", self.get_workers),
                web.get("/workers/{worker_id:.+}", self.get_worker),
                web.delete("/workers/{worker_id:.+}", self.delete_worker),
                web.route("*", "/{path:.*}", self.proxy),
            ]
        )
        return app

    async def _client(self, app: web.Application):
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=self.max_connections),
            timeout=aiohttp.ClientTimeout(total=self.request_timeout, sock_connect=10),
            auto_decompress=False,
        )
        yield
        await self.session.close()

    async def health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "workers": len(self.pool)})

    async def readiness(self, request: web.Request) -> web.Response:
        ready = any(worker.healthy for worker in self.pool.workers)
        return web.json_response({"ready": ready}, status=200 if ready else 503)

    async def add_worker(self, request: web.Request) -> web.Response:
        """`?url=` or a body with url or worker_url."""
        worker = self._add(await _url_of(request))
        return web.json_response({"status": "success", "worker_id": worker.worker_id, "worker_urls": self._loads()})

    async def remove_worker(self, request: web.Request) -> web.Response:
        self._remove(await _url_of(request))
        return web.json_response({"status": "success", "worker_urls": self._loads()})

    async def list_workers(self, request: web.Request) -> web.Response:
        return web.json_response({"urls": [worker.url for worker in self.pool.workers]})

    async def create_worker(self, request: web.Request) -> web.Response:
        worker = self._add(await _url_of(request))
        return web.json_response({"status": "accepted", "worker_id": worker.worker_id, "url": worker.url}, status=202)

    async def get_workers(self, request: web.Request) -> web.Response:
        workers = [worker.describe() for worker in self.pool.workers]
        return web.json_response({"workers": workers, "total": len(workers)})

    async def get_worker(self, request: web.Request) -> web.Response:
        wanted = request.match_info["worker_id"]
        for worker in self.pool.workers:
            if wanted in (worker.worker_id, worker.url):
                return web.json_response(worker.describe())
        return _error(404, f"there is no worker {wanted}")

    async def delete_worker(self, request: web.Request) -> web.Response:
        worker = self._remove(request.match_info["worker_id"])
        return web.json_response({"status": "accepted", "worker_id": worker.worker_id}, status=202)

    def _add(self, url: str) -> Worker:
        try:
            worker = self.pool.add(url)
        except ValueError as error:
            raise web.HTTPBadRequest(text=_error_body(str(error)), content_type="application/json") from error
        logger.info("worker %s at %s", worker.worker_id, worker.url)
        return worker

    def _remove(self, id_or_url: str) -> Worker:
        worker = self.pool.remove(id_or_url)
        if worker is None:
            message = f"there is no worker {id_or_url}"
            raise web.HTTPNotFound(text=_error_body(message), content_type="application/json")
        logger.info("worker %s at %s removed", worker.worker_id, worker.url)
        return worker

    def _loads(self) -> dict[str, int]:
        return {worker.url: worker.in_flight for worker in self.pool.workers}

    async def proxy(self, request: web.Request) -> web.StreamResponse:
        """Pass a request to the least loaded worker; on to the next when it is unreachable or dies on the way."""
        body = await request.read()
        tried: list[Worker] = []
        failure: Exception | None = None
        while (worker := self.pool.pick(tried)) is not None:
            for _ in range(RETRIES_PER_WORKER):
                answer = _Answer(request)
                try:
                    return await self._forward(worker, request, body, answer)
                except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
                    failure = error
                    worker.fail()
                    logger.warning("%s %s at %s: %r", request.method, request.path, worker.url, error)
                    if answer.started:
                        # The client has part of a stream: cut it, so that it sees the failure.
                        if request.transport is not None:
                            request.transport.close()
                        raise
                except asyncio.TimeoutError:
                    return _error(504, f"{worker.url} did not answer within {self.request_timeout:g} s")
                if isinstance(failure, aiohttp.ClientConnectorError):
                    break
            tried.append(worker)
        if failure is None:
            return _error(503, "no worker is registered", code="no_available_workers")
        return _error(502, f"no worker could answer; the last failure: {failure!r}", code="workers_failed")

    async def _forward(self, worker: Worker, request: web.Request, body: bytes, answer: _Answer) -> web.StreamResponse:
        headers = CIMultiDict((k, v) for k, v in request.headers.items() if k.lower() not in HOP_BY_HOP)
        worker.in_flight += 1
        try:
            async with self.session.request(
                request.method,
                worker.url + request.raw_path,
                data=body or None,
                headers=headers,
                allow_redirects=False,
            ) as reply:
                if reply.content_type == "text/event-stream":
                    result = await answer.stream(reply)
                else:
                    result = web.Response(body=await reply.read(), status=reply.status, headers=_passed_on(reply))
            worker.succeed()
            return result
        finally:
            worker.in_flight -= 1


class _Answer:
    """A streamed reply to the client."""

    def __init__(self, request: web.Request) -> None:
        self.request = request
        self.started = False

    async def stream(self, reply: aiohttp.ClientResponse) -> web.StreamResponse:
        response = web.StreamResponse(status=reply.status, headers=_passed_on(reply))
        await response.prepare(self.request)
        self.started = True
        async for chunk in reply.content.iter_any():
            await response.write(chunk)
        await response.write_eof()
        return response


def _passed_on(reply: aiohttp.ClientResponse) -> CIMultiDict:
    kept = CIMultiDict((k, v) for k, v in reply.headers.items() if k.lower() not in HOP_BY_HOP)
    if "Content-Encoding" in reply.headers:
        kept["Content-Encoding"] = reply.headers["Content-Encoding"]
    return kept


def _error_body(message: str, code: str | None = None) -> str:
    return json.dumps({"error": {"message": message, "code": code} if code else {"message": message}})


def _error(status: int, message: str, code: str | None = None) -> web.Response:
    return web.Response(status=status, text=_error_body(message, code), content_type="application/json")


async def _url_of(request: web.Request) -> str:
    if "url" in request.query:
        return request.query["url"]
    body = await request.read()
    with contextlib.suppress(ValueError):
        data = json.loads(body or b"{}")
        if isinstance(data, dict):
            return data.get("url") or data.get("worker_url") or ""
    return ""


async def serve(args: argparse.Namespace) -> None:
    """Run until SIGTERM, SIGINT or the end of the parent process."""
    router = Router(args.request_timeout_secs, args.max_connections)
    # A client that goes away cancels its handler, which closes the request at the worker.
    runner = web.AppRunner(router.app(), handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    site = web.TCPSite(runner, args.host, args.port, backlog=4096)
    await site.start()
    host, port = runner.addresses[0][:2]
    for url in args.worker_urls:
        router.pool.add(url)
    if args.port_file:
        atomic_write(args.port_file, str(port).encode())
    logger.info("router at http://%s:%d", host, port)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    waits = [asyncio.ensure_future(stop.wait())]
    if args.parent_pid:
        waits.append(asyncio.ensure_future(wait_for_exit(args.parent_pid)))
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    await runner.cleanup()


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m slime.router.server", description=__doc__.splitlines()[0])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--port-file", help="the port is written here once the router listens")
    parser.add_argument("--parent-pid", type=int, help="exit when this process is gone")
    parser.add_argument("--request-timeout-secs", type=float, default=14400.0)
    parser.add_argument("--max-connections", type=int, default=0, help="to all workers; 0 is no limit")
    parser.add_argument("--worker-urls", nargs="*", default=[], help="workers to start with")
    parser.add_argument("--log-level", default="INFO")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    configure_logging(args.log_level, f"router {os.getpid()}")
    asyncio.run(serve(args))


if __name__ == "__main__":
    main()
