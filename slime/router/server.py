"""slime's router: an HTTP proxy in front of the inference servers.

    python -m slime.router.server --port 0 --port-file FILE

Requests go to the worker with the fewest in flight, or, with an `X-SMG-Routing-Key` header, to the key's worker. When
a worker dies before it has answered, its request goes to another one; while there is none, requests wait. A client
that hangs up takes its request at the worker with it. Engines are controlled (weights, memory, abort) directly, never
through here.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import signal
from argparse import Namespace

import aiohttp
from aiohttp import web

from slime.observability import stacks
from slime.router.health import HealthProbes
from slime.router.middleware_hub import load_middleware
from slime.router.proxy import Proxy, error_body, error_response
from slime.router.workers import Worker, WorkerPool
from slime.utils.async_utils import wait_for_exit
from slime.utils.logging_utils import configure_logging
from slime.utils.misc import atomic_write

logger = logging.getLogger(__name__)

MAX_BODY = 4 << 30


class Router:
    """The HTTP application.

    Args:
        request_timeout: seconds that a worker may take for one request.
        max_connections: to all workers together; 0 is no limit.
        queue_timeout: seconds that a request waits while no worker can take it.
        failure_threshold: failures in a row until a worker is quarantined.
        health_interval, health_timeout: of the probes, in seconds.
        middleware_paths: import paths, see `slime.router.middleware_hub`.
        args: what middleware may read: `hf_checkpoint`, `trust_remote_code`.
    """

    def __init__(
        self,
        request_timeout: float = 14400.0,
        max_connections: int = 0,
        queue_timeout: float = 30.0,
        failure_threshold: int = 3,
        health_interval: float = 10.0,
        health_timeout: float = 5.0,
        middleware_paths: list[str] | tuple[str, ...] = (),
        args: Namespace | None = None,
    ) -> None:
        self.pool = WorkerPool(failure_threshold)
        self.request_timeout = request_timeout
        self.max_connections = max_connections
        self.queue_timeout = queue_timeout
        self.health_interval, self.health_timeout = health_interval, health_timeout
        self.middleware_paths = middleware_paths
        self.args = args or Namespace(hf_checkpoint=None, trust_remote_code=False)
        self.proxy: Proxy | None = None

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
                web.post("/retrieve_from_text", self.retrieve_from_text),
                web.route("*", "/{path:.*}", self.forward),
            ]
        )
        app.middlewares.extend(load_middleware(path, app, self) for path in self.middleware_paths)
        return app

    async def _client(self, app: web.Application):
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=self.max_connections),
            timeout=aiohttp.ClientTimeout(total=self.request_timeout, sock_connect=10),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),  # one client's cookies are not for the next
        ) as session:
            self.proxy = Proxy(self.pool, session, self.request_timeout, self.queue_timeout)
            probes = HealthProbes(self.pool, session, self.health_interval, self.health_timeout)
            task = asyncio.ensure_future(probes.run())
            yield
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def forward(self, request: web.Request) -> web.StreamResponse:
        return await self.proxy.forward(request)

    async def retrieve_from_text(self, request: web.Request) -> web.Response:
        """Answered by the middleware that remembers conversations."""
        path = "slime.router.middleware_hub.radix_tree_middleware.RadixTreeMiddleware"
        return error_response(404, f"needs --slime-router-middleware-paths {path}")

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
        return error_response(404, f"there is no worker {wanted}")

    async def delete_worker(self, request: web.Request) -> web.Response:
        worker = self._remove(request.match_info["worker_id"])
        return web.json_response({"status": "accepted", "worker_id": worker.worker_id}, status=202)

    def _add(self, url: str) -> Worker:
        try:
            worker = self.pool.add(url)
        except ValueError as error:
            raise web.HTTPBadRequest(text=error_body(str(error)), content_type="application/json") from error
        logger.info("worker %s at %s", worker.worker_id, worker.url)
        return worker

    def _remove(self, id_or_url: str) -> Worker:
        worker = self.pool.remove(id_or_url)
        if worker is None:
            message = f"there is no worker {id_or_url}"
            raise web.HTTPNotFound(text=error_body(message), content_type="application/json")
        logger.info("worker %s at %s removed", worker.worker_id, worker.url)
        return worker

    def _loads(self) -> dict[str, int]:
        return {worker.url: worker.in_flight for worker in self.pool.workers}


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
    router = Router(
        args.request_timeout_secs,
        args.max_connections,
        args.queue_timeout_secs,
        args.health_check_failure_threshold,
        args.health_check_interval_secs,
        args.health_check_timeout_secs,
        args.middleware_paths,
        args,
    )
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
    parser.add_argument("--queue-timeout-secs", type=float, default=30.0, help="longest wait for a worker")
    parser.add_argument("--health-check-interval-secs", type=float, default=10.0)
    parser.add_argument("--health-check-timeout-secs", type=float, default=5.0)
    parser.add_argument("--health-check-failure-threshold", type=int, default=3, help="failures until quarantine")
    parser.add_argument("--middleware-paths", nargs="*", default=[], help="import paths of middleware classes")
    parser.add_argument("--hf-checkpoint", help="tokenizer for middleware that needs one")
    parser.add_argument("--trust-remote-code", action="store_true")
    parser.add_argument("--log-level", default="INFO")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    configure_logging(args.log_level, f"router {os.getpid()}")
    stacks.dump_on_signal()
    asyncio.run(serve(args))


if __name__ == "__main__":
    main()
