"""Middleware of slime's router: classes that see each request before it is sent on, and its answer.

    class Middleware:
        def __init__(self, app, *, router): ...
        async def dispatch(self, request, call_next): return await call_next(request)

`request` is an `aiohttp.web.Request`, the answer an `aiohttp.web.StreamResponse`. `router.pool` has the workers,
`router.args` the checkpoint that the engines serve. The first path given is the outermost. `payload_of` and `replace`
read and change the JSON body that the worker gets.

ASGI middleware is built in the same way and may stand beside it: a class with `__call__(scope, receive, send)`, such
as a subclass of Starlette's `BaseHTTPMiddleware`, whose `dispatch` then gets Starlette's requests and answers.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from slime.router.middleware_hub.asgi import exchange, inner_app, is_asgi
from slime.router.proxy import BODY, error_response
from slime.utils.misc import HookError, failure, load_function

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
FLAG = "--slime-router-middleware-paths"
HEALTH = "/health"

logger = logging.getLogger(__name__)


def load_middleware(path: str, app: web.Application, router: Any) -> Callable:
    """The middleware class at an import path, as aiohttp calls it.

    Raises:
        HookError: it has neither `dispatch` nor `__call__`, or cannot be built as `Class(app, router=router)`.
    """
    factory = load_function(path, FLAG)
    asgi = is_asgi(factory)
    try:
        instance = factory(inner_app if asgi else app, router=router)
    except Exception as error:
        raise HookError(f"{FLAG} {path}: {failure(error)}; it is built as Class(app, router=router)") from error
    if not callable(instance if asgi else getattr(instance, "dispatch", None)):
        raise HookError(f"{FLAG} {path} has no method dispatch(request, call_next), and no ASGI __call__")

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path == HEALTH:  # whether the router is up is not the middleware's to say
            return await handler(request)
        of_the_rest: list[Exception] = []

        async def call_next(inner: web.Request) -> web.StreamResponse:
            try:
                return await handler(inner)
            except Exception as error:
                of_the_rest.append(error)
                raise

        try:
            response = await (
                exchange(instance, request, call_next) if asgi else instance.dispatch(request, call_next)
            )
            if not isinstance(response, web.StreamResponse):
                raise TypeError(f"it returned {response!r:.100}, not a response")
        except web.HTTPException:
            raise
        except Exception as error:
            if any(error is known for known in of_the_rest):
                raise
            logger.exception("%s %s", FLAG, path)
            return error_response(500, f"{FLAG} {path} failed: {failure(error)}", code="middleware_failed")
        return response

    return middleware


async def payload_of(request: web.Request) -> dict[str, Any] | None:
    """The JSON object that the worker will get; None when the body is none."""
    body = request[BODY] if BODY in request else await request.read()
    try:
        payload = json.loads(body)
    except ValueError:
        return None
    return payload if isinstance(payload, dict) else None


def replace(request: web.Request, payload: dict[str, Any]) -> None:
    """Let the worker get `payload` instead of the body that the client sent."""
    request[BODY] = json.dumps(payload).encode()
