"""A real HTTP server that speaks an engine's native API without a model: for tests of whatever calls engines."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from aiohttp import web


class ScriptedEngine:
    """/generate, /abort_request, /get_model_info, and /workers of a router whose only worker it is.

    Emits one token per `token_seconds`; replies depend on seed and prompt alone. `hang_when(payload)` makes a request
    wait after two tokens until it is aborted, `slow_when(payload)` takes twenty times as long per token.
    """

    first_token, last_token = 30, 90
    """Token ids that it emits, the last one excluded."""

    def __init__(
        self, token_seconds: float = 0.0, hang_when: Callable[[dict], bool] | None = None, version: str = "1"
    ) -> None:
        self.token_seconds = token_seconds
        self.hang_when = hang_when or (lambda payload: False)
        self.slow_when: Callable[[dict], bool] = lambda payload: False
        self.version = version
        self.detokenize: Callable[[list[int]], str] = lambda tokens: " ".join(f"t{t}" for t in tokens)
        self.requests: list[dict] = []
        self.aborts = 0
        self.disconnects = 0
        self.running: set[asyncio.Event] = set()
        self.url = ""

    async def generate(self, request: web.Request) -> web.StreamResponse:
        payload = await request.json()
        self.requests.append(payload)
        aborted = asyncio.Event()
        self.running.add(aborted)
        params = payload["sampling_params"]
        rng = random.Random(f"{params.get('sampling_seed')}:{payload['input_ids'][-1]}")
        tokens: list[int] = []
        reason: dict[str, Any] = {"type": "length", "length": params["max_new_tokens"]}
        hang = self.hang_when(payload)
        try:
            for i in range(params["max_new_tokens"]):
                pause = None if hang and i >= 2 else self.token_seconds * (20 if self.slow_when(payload) else 1)
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(aborted.wait(), pause)
                if aborted.is_set():
                    reason = {"type": "abort", "message": "Aborted"}
                    break
                tokens.append(rng.randrange(self.first_token, self.last_token))
                if rng.random() < 0.2:
                    reason = {"type": "stop", "matched": tokens[-1]}
                    break
        except asyncio.CancelledError:
            self.disconnects += 1
            raise
        finally:
            self.running.discard(aborted)
        meta = {
            "finish_reason": reason,
            "weight_version": self.version,
            "weight_versions": [{"version": self.version, "start": 0, "end": len(tokens)}] if tokens else [],
            "prompt_tokens": len(payload["input_ids"]),
            "completion_tokens": len(tokens),
            "cached_tokens": 0,
            "output_token_logprobs": [[-0.5 - t / 100, t, None] for t in tokens],
        }
        return web.json_response({"text": self.detokenize(tokens), "output_ids": tokens, "meta_info": meta})

    async def abort(self, request: web.Request) -> web.Response:
        self.aborts += 1
        for event in self.running:
            event.set()
        return web.Response()

    async def model_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.version})

    async def workers(self, request: web.Request) -> web.Response:
        return web.json_response({"workers": [{"url": self.url}]})

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/abort_request", self.abort)
        app.router.add_get("/get_model_info", self.model_info)
        app.router.add_get("/workers", self.workers)
        return app


@contextlib.asynccontextmanager
async def served(app: web.Application) -> AsyncIterator[str]:
    """Serve an app on a free port; yields its URL."""
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.2)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    try:
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


@contextlib.contextmanager
def served_in_thread(app: web.Application) -> Iterator[str]:
    """As `served`, on an event loop of its own, as another process would serve it."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="slime-served", daemon=True)
    thread.start()
    server = served(app)
    try:
        yield asyncio.run_coroutine_threadsafe(server.__aenter__(), loop).result(20)
    finally:
        asyncio.run_coroutine_threadsafe(server.__aexit__(None, None, None), loop).result(20)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(20)
        loop.close()
