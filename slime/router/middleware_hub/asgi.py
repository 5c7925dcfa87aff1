"""ASGI middleware around the router: Starlette's classes, and everything else that is `Class(app, *, router)` with
`async def __call__(self, scope, receive, send)`.

The router itself speaks aiohttp. An exchange is translated on its way into such a middleware, and back where the
middleware calls the application that it wraps: the body and the headers that arrive there are what the worker gets.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from aiohttp import web
from multidict import CIMultiDict

from slime.router.proxy import BODY, HEADERS, SINK, StreamSink, is_event_stream

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Scope]]
Send = Callable[[Scope], Awaitable[None]]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_EXCHANGE = "slime.exchange"


def is_asgi(factory: Callable) -> bool:
    """Whether instances of the class, or what the function returns, take (scope, receive, send)."""
    if not inspect.isclass(factory):
        return True
    return any("__call__" in base.__dict__ for base in factory.__mro__)


async def inner_app(scope: Scope, receive: Receive, send: Send) -> None:
    """The application that a middleware wraps: the rest of the router, for the exchange in `scope`.

    Raises:
        ValueError: the middleware did not hand on the scope that it was given, or a copy of it.
    """
    if scope["type"] != "http" or _EXCHANGE not in scope:
        raise ValueError("middleware of the router must pass the scope that it was called with, or a copy of it")
    request, handler = scope[_EXCHANGE]
    request[BODY] = await _read(receive)
    request[HEADERS] = CIMultiDict(
        (name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]
    )
    outer = request.get(SINK)
    sink = _SendSink(send)
    request[SINK] = sink
    try:
        response = await handler(request)
    except web.HTTPException as error:
        response = error
    finally:
        request[SINK] = outer
    if sink.started:
        return
    body = response.body if isinstance(response, web.Response) else None
    await send({"type": "http.response.start", "status": response.status, "headers": _raw(response.headers)})
    await send({"type": "http.response.body", "body": bytes(body or b"")})


async def exchange(app: Callable, request: web.Request, handler: Handler) -> web.StreamResponse:
    """Send one request through the ASGI application `app`, whose innermost call is `handler`."""
    body = request[BODY] if BODY in request else await request.read()
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> Scope:
        message = next(messages, None)
        if message is None:
            # A client that hangs up cancels the handler; nothing else is to come.
            await asyncio.Event().wait()
        return message

    answer = _Collector(request.get(SINK) or StreamSink(request))
    await app(_scope(request, handler), receive, answer.send)
    return answer.response()


def _scope(request: web.Request, handler: Handler) -> Scope:
    headers = request.get(HEADERS, request.headers)
    peer = request.transport.get_extra_info("peername") if request.transport is not None else None
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": f"{request.version.major}.{request.version.minor}",
        "method": request.method,
        "scheme": request.scheme,
        "path": request.path,
        "raw_path": request.rel_url.raw_path.encode(),
        "query_string": request.rel_url.raw_query_string.encode(),
        "root_path": "",
        "headers": _raw(headers),
        "client": peer[:2] if isinstance(peer, tuple) else None,
        "server": None,
        "state": {},
        _EXCHANGE: (request, handler),
    }


async def _read(receive: Receive) -> bytes:
    parts, more = [], True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionResetError("the client hung up")
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(parts)


def _raw(headers: CIMultiDict) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]


class _SendSink:
    """Where a worker's stream goes: to the middleware outside of it."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False

    async def start(self, status: int, headers: CIMultiDict) -> None:
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": _raw(headers)})

    async def write(self, chunk: bytes) -> None:
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def finish(self) -> web.StreamResponse:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})
        return web.StreamResponse()


class _Collector:
    """What a middleware sends: passed on at once when it is a stream of events, else a whole response."""

    def __init__(self, sink: Any) -> None:
        self._sink = sink
        self._status = 0
        self._headers: CIMultiDict = CIMultiDict()
        self._body = bytearray()
        self._streamed: web.StreamResponse | None = None

    async def send(self, message: Scope) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            pairs = ((n.decode("latin-1"), v.decode("latin-1")) for n, v in message.get("headers", ()))
            self._headers = CIMultiDict((n, v) for n, v in pairs if n.lower() != "content-length")
            if is_event_stream(self._headers):
                await self._sink.start(self._status, self._headers)
        elif message["type"] == "http.response.body":
            body = message.get("body", b"")
            if not is_event_stream(self._headers):
                self._body += body
                return
            if body:
                await self._sink.write(body)
            if not message.get("more_body", False):
                self._streamed = await self._sink.finish()

    def response(self) -> web.StreamResponse:
        if self._status == 0:
            raise RuntimeError("the middleware sent no response")
        if self._streamed is not None:
            return self._streamed
        return web.Response(body=bytes(self._body), status=self._status, headers=self._headers)
