"""Requests on their way into an ASGI application: read, changed, passed on or answered."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import orjson

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


class Refused(Exception):
    """A request that must not reach SGLang."""

    def __init__(self, message: str, status: int = 400):
        super().__init__(message)
        self.status = status


class Call:
    """A control request that was read and may go on to SGLang."""

    def __init__(self, app: Any, scope: dict[str, Any], body: bytes):
        self.app = app
        self.scope = scope
        self.body = body
        self.path: str = scope["path"]

    def json(self) -> dict[str, Any]:
        """The body as an object; an empty body is an empty object."""
        try:
            content = orjson.loads(self.body) if self.body else {}
        except ValueError as error:
            raise Refused(f"the body is not JSON: {error}") from error
        if not isinstance(content, dict):
            raise Refused("the body must be a JSON object")
        return content

    async def forward(self, send: Send) -> int:
        """SGLang answers; returns the status."""
        status = 0

        async def watch(message: dict[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        # SGLang requires a body where it reads one.
        await self.app(*with_body(self.scope, self.body or b"{}", disconnected), watch)
        return status

    async def inside(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """Another request to SGLang in the name of this one: (status, reply)."""
        status, parts = 0, []

        async def collect(message: dict[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                parts.append(message.get("body", b""))

        scope = {**self.scope, "method": method, "path": path, "raw_path": path.encode(), "query_string": b""}
        await self.app(*with_body(scope, body, disconnected), collect)
        return status, b"".join(parts)


async def disconnected() -> dict[str, Any]:
    """Control calls run to their end, whether the caller waits or not."""
    await asyncio.Event().wait()
    return {"type": "http.disconnect"}


async def read(receive: Receive) -> bytes:
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Refused("the client went away", status=499)
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


def with_body(scope: dict[str, Any], body: bytes, rest: Receive) -> tuple[dict[str, Any], Receive]:
    """The request with `body` in one piece; what comes after it is still received from the client."""
    headers = [(k, v) for k, v in scope["headers"] if k not in (b"content-length", b"transfer-encoding")]
    if not any(k == b"content-type" for k, _ in headers):
        headers.append((b"content-type", b"application/json"))
    headers.append((b"content-length", str(len(body)).encode()))
    sent = False

    async def receive() -> dict[str, Any]:
        nonlocal sent
        if sent:
            return await rest()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return {**scope, "headers": headers}, receive


async def respond(send: Send, status: int, content: Any = b"") -> None:
    body = content if isinstance(content, bytes) else orjson.dumps(content)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
