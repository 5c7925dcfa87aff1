"""The HTTP client of the rollout side: one aiohttp session per event loop, retries with back-off.

A server that restarts answers with refused connections and 502-504 for a while; that is waited out. A 4xx is the
caller's mistake and is raised at once with the server's own message.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import json
import logging
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp

logger = logging.getLogger(__name__)

WAIT_OUT = (502, 503, 504)
"""Replies of a router or server that is not up yet."""
MAX_SERVER_ERRORS = 3
"""How often any other 5xx is tried: it may well be deterministic."""


@dataclass
class _Settings:
    request_timeout: float = 14400.0
    max_connections: int = 0


_settings = _Settings()
Sender = Callable[[str, Any, int, "dict[str, str] | None"], Awaitable[Any]]
_sender: Sender | None = None
_sessions: dict[asyncio.AbstractEventLoop, aiohttp.ClientSession] = {}
_sessions_lock = threading.Lock()


class HttpError(RuntimeError):
    """A reply that is not a success. `status` is the HTTP status, `body` the start of what the server said."""

    def __init__(self, method: str, url: str, status: int, body: str) -> None:
        super().__init__(f"{method} {url} answered {status}: {body[:2000]}")
        self.method, self.url = method, url
        self.status = status
        self.body = body

    def __reduce__(self) -> tuple:
        return HttpError, (self.method, self.url, self.status, self.body)


def send_through(sender: Sender | None) -> None:
    """Let `post` hand its requests (url, payload, max_retries, headers) to `sender`; None: send them here."""
    global _sender
    _sender = sender


def init_http_client(args) -> None:
    """Take timeout and connection limit from the arguments; without a call the defaults above hold."""
    _settings.request_timeout = float(args.sglang_router_request_timeout_secs)


def session() -> aiohttp.ClientSession:
    """The session of the running loop."""
    loop = asyncio.get_running_loop()
    with _sessions_lock:
        current = _sessions.get(loop)
        if current is None or current.closed:
            connector = aiohttp.TCPConnector(limit=_settings.max_connections, ttl_dns_cache=300)
            timeout = aiohttp.ClientTimeout(total=_settings.request_timeout, sock_connect=30)
            current = aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=False)
            for closed in [known for known in _sessions if known.is_closed()]:
                del _sessions[closed]
            _sessions[loop] = current
        return current


async def close_session() -> None:
    """Close the session of the running loop, if there is one."""
    with _sessions_lock:
        current = _sessions.pop(asyncio.get_running_loop(), None)
    if current is not None:
        await current.close()


@atexit.register
def _close_sessions_of_running_loops() -> None:
    for loop, current in list(_sessions.items()):
        if loop.is_running() and not current.closed:
            with contextlib.suppress(concurrent.futures.TimeoutError, RuntimeError):
                asyncio.run_coroutine_threadsafe(current.close(), loop).result(timeout=2)


def backoff(attempt: int, first: float = 0.1, ceiling: float = 5.0) -> float:
    """Seconds to wait before retry number `attempt` (from 0)."""
    return min(first * 2**attempt, ceiling)


async def request(
    method: str,
    url: str,
    *,
    json_body: Any = None,
    max_retries: int = 60,
    headers: dict[str, str] | None = None,
    timeout: float | None = None,
    quiet: bool = False,
) -> Any:
    """One request with retries; the decoded JSON reply (or the text when it is not JSON, None when empty).

    Raises:
        HttpError: a 4xx, or a 5xx after the retries.
        aiohttp.ClientError, asyncio.TimeoutError: no reply after the retries.
    """
    options = {} if timeout is None else {"timeout": aiohttp.ClientTimeout(total=timeout)}
    attempt = server_errors = 0
    while True:
        try:
            async with session().request(method, url, json=json_body, headers=headers, **options) as reply:
                body = await reply.read()
                if reply.status < 400:
                    return _decode(body, reply.headers.get("Content-Type", ""))
                failure: Exception = HttpError(method, url, reply.status, body.decode("utf-8", "replace"))
                if reply.status < 500:
                    raise failure
                if reply.status not in WAIT_OUT:
                    server_errors += 1
                    if server_errors >= MAX_SERVER_ERRORS:
                        raise failure
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            failure = error
        if attempt >= max_retries:
            raise failure
        if not quiet and attempt in (3, 10, 30):
            logger.warning("%s %s: attempt %d failed: %s", method, url, attempt + 1, str(failure)[:300])
        await asyncio.sleep(backoff(attempt))
        attempt += 1


async def post(url: str, payload: Any = None, max_retries: int = 60, headers: dict[str, str] | None = None) -> Any:
    """POST JSON, answer decoded. See `request`."""
    payload = {} if payload is None else payload
    if _sender is not None:
        return await _sender(url, payload, max_retries, headers)
    return await request("POST", url, json_body=payload, max_retries=max_retries, headers=headers)


async def get(url: str, max_retries: int = 60, headers: dict[str, str] | None = None) -> Any:
    """GET, answer decoded. See `request`."""
    return await request("GET", url, max_retries=max_retries, headers=headers)


def _decode(body: bytes, content_type: str) -> Any:
    if not body:
        return None
    if "json" not in content_type:
        with contextlib.suppress(ValueError):
            return json.loads(body)
        return body.decode("utf-8", "replace")
    return json.loads(body)
