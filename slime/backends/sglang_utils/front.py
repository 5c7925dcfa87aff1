"""In front of SGLang's HTTP application: what would kill a stock server or serve wrong tokens is answered here.

The rules, each seen with a stock release:
- A token id outside the vocabulary ends the scheduler: refused with 400.
- While weights or KV cache are released, or weights came back without content, a generation (also a health check that
  generates) crashes or answers from zeros: refused with 503; health checks do not generate.
- Releasing memory while requests run, taking back what was not released, or flushing a cache that held requests use,
  ends the scheduler: refused, left out, or done without the flush.
- A prefix cache that outlives a weight update serves old KV: it is flushed, and where that cannot be done later
  requests are keyed apart from it.

It also evens out releases: all speak the API of the newest (`compat.Release` knows what is missing). A request that
nothing concerns passes through unchanged; only the token ids of /generate are looked at.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import orjson

from slime.backends.sglang_utils.compat import Release

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]

MEMORY_TAGS = ("kv_cache", "weights", "cuda_graph")
FLUSH_PATIENCE_SECS = 60.0
FLUSH_INTERVAL_SECS = 0.05
GENERATING = ("/generate", "/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses")
NEEDS_SESSION = ("/update_weights_from_tensor", "/update_weights_from_distributed")


class Refused(Exception):
    """A request that must not reach SGLang."""

    def __init__(self, message: str, status: int = 400):
        super().__init__(message)
        self.status = status


def read_vocab_size(model_path: str) -> int | None:
    """Entries of the embedding table by the checkpoint's config.json; None where that does not say."""
    path = Path(model_path) / "config.json"
    if not path.is_file():
        return None
    config = json.loads(path.read_text())
    size = config.get("vocab_size", (config.get("text_config") or {}).get("vocab_size"))
    return size if isinstance(size, int) else None


class Front:
    """ASGI middleware around SGLang's application.

    Args:
        app: the application inside.
        model_path: checkpoint whose vocabulary bounds token ids.
        keeps_released_weights: the server runs with `--enable-weights-cpu-backup`.
    """

    def __init__(self, app: Any, release: Release, model_path: str, keeps_released_weights: bool):
        self.app = app
        self.release = release
        self.vocab_size = read_vocab_size(model_path)
        self.keeps_released_weights = keeps_released_weights
        self.running = 0
        """Generation requests inside SGLang."""
        self.pause_mode: str | None = None
        self.released: set[str] = set()
        self.weights_missing = False
        """The weights have no content until they are pushed."""
        self.updating = False
        self.pushed = False
        """The open update has loaded something."""
        self.cache_is_empty = True
        self.cache_key = 0
        """How many updates the prefix cache has outlived; enters the key of later requests."""
        self._serving = asyncio.Event()
        self._serving.set()
        self._control = asyncio.Lock()
        self._handlers = {
            "/pause_generation": self.pause,
            "/continue_generation": self.resume,
            "/flush_cache": self.flush,
            "/release_memory_occupation": self.release_memory,
            "/resume_memory_occupation": self.resume_memory,
            "/begin_weight_update": self.begin_update,
            "/end_weight_update": self.end_update,
            "/update_weights_from_tensor": self.update_weights,
            "/update_weights_from_distributed": self.update_weights,
            "/update_weights_from_disk": self.update_weights,
            "/weights_checker": self.check_weights,
        }

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = scope["path"]
        try:
            if path in GENERATING:
                await self.generate(scope, receive, send)
            elif path in ("/health", "/health_generate") and self._rests:
                await _respond(send, 200)
            elif path in ("/get_weight_version", "/weight_version") and path not in self.release.routes:
                await self.weight_version(scope, send)
            elif path in self._handlers:
                body = await _read(receive)
                async with self._control:
                    await self._handlers[path](Call(self.app, scope, body), send)
            else:
                await self.app(scope, receive, send)
        except Refused as refusal:
            error = {"object": "error", "error": {"message": str(refusal), "code": refusal.status}}
            await _respond(send, refusal.status, error)

    # -- generation ---------------------------------------------------------------------------------------------------

    @property
    def _rests(self) -> bool:
        """Paused or released on purpose: healthy, but a generation would not come back."""
        return self.pause_mode is not None or self._not_serving is not None

    @property
    def _not_serving(self) -> str | None:
        if self.released & {"kv_cache", "weights"}:
            return (
                f"the {' and '.join(sorted(self.released))} memory is released: POST /resume_memory_occupation first"
            )
        if self.weights_missing:
            return "the weights have no content until they are pushed"
        return None

    async def generate(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """Let a request through when tokens can be computed for it; while generation is paused it waits."""
        body = await _read(receive)
        if scope["path"] == "/generate":
            self._check_token_ids(body)
        self._refuse_unless_serving()
        while not self._serving.is_set():
            await self._serving.wait()
            self._refuse_unless_serving()
        if self.cache_key:
            body = self._with_cache_key(body)
        self.cache_is_empty = False
        self.running += 1
        try:
            await self.app(*_with_body(scope, body, receive), send)
        finally:
            self.running -= 1

    def _refuse_unless_serving(self) -> None:
        reason = self._not_serving
        if reason:
            raise Refused(reason, status=503)

    def _check_token_ids(self, body: bytes) -> None:
        try:
            ids = orjson.loads(body).get("input_ids")
        except (ValueError, AttributeError):
            return  # no JSON object: SGLang's own answer is right
        if not ids or not isinstance(ids, list):
            return
        for prompt in ids if isinstance(ids[0], list) else [ids]:
            if not isinstance(prompt, list) or set(map(type, prompt)) != {int}:
                raise Refused("input_ids must be a non-empty list of integers, or a list of such lists")
            low, high = min(prompt), max(prompt)
            if low < 0 or (self.vocab_size is not None and high >= self.vocab_size):
                bad = low if low < 0 else high
                raise Refused(f"input_ids: token id {bad} is outside the vocabulary of {self.vocab_size}")

    def _with_cache_key(self, body: bytes) -> bytes:
        """The request, unable to use the prefix cache of weights that are gone."""
        try:
            request = orjson.loads(body)
        except ValueError:
            return body
        if not isinstance(request, dict):
            return body
        mark = f"weights-{self.cache_key}:"
        own = request.get("extra_key")
        request["extra_key"] = [mark + (key or "") for key in own] if isinstance(own, list) else mark + (own or "")
        return orjson.dumps(request)

    # -- pausing ------------------------------------------------------------------------------------------------------

    async def pause(self, call: Call, send: Send) -> None:
        mode = call.json().get("mode", "abort")
        if mode not in ("abort", "in_place", "retract"):
            raise Refused(f"pause mode must be one of abort, in_place, retract, got {mode!r}")
        self._serving.clear()
        if await call.forward(send) == 200:
            self.pause_mode = mode
        elif self.pause_mode is None:
            self._serving.set()

    async def resume(self, call: Call, send: Send) -> None:
        if self.running:
            self._refuse_unless_serving()
            if self.cache_key and self.pause_mode == "retract":
                await self._flush(call)  # or the retracted requests are prefilled from the old weights' KV
        if await call.forward(send) == 200:
            self.pause_mode = None
            self._serving.set()

    async def flush(self, call: Call, send: Send) -> None:
        if self.running and self.pause_mode in ("in_place", "retract") and not self._may_flush:
            raise Refused(f"{self.running} requests are held: their KV is in the cache")
        if await call.forward(send) == 200:
            self._cache_emptied()

    @property
    def _may_flush(self) -> bool:
        return self.running == 0 or (self.pause_mode == "retract" and self.release.flushes_while_held)

    def _cache_emptied(self) -> None:
        self.cache_is_empty = self.running == 0 or self.pause_mode == "retract"
        self.cache_key = 0 if self.cache_is_empty else self.cache_key

    async def _flush(self, call: Call) -> None:
        """Flush the prefix cache; SGLang refuses while the last requests wind down, so ask again."""
        deadline = asyncio.get_running_loop().time() + FLUSH_PATIENCE_SECS
        while True:
            status, reply = await call.inside("POST", "/flush_cache")
            if status == 200:
                self._cache_emptied()
                return
            if asyncio.get_running_loop().time() > deadline:
                raise Refused(f"the cache cannot be flushed: {reply.decode(errors='replace')}")
            await asyncio.sleep(FLUSH_INTERVAL_SECS)

    # -- memory -------------------------------------------------------------------------------------------------------

    async def release_memory(self, call: Call, send: Send) -> None:
        tags = [tag for tag in _tags(call) if tag not in self.released]
        if not self._may_flush:
            raise Refused(f"{self.running} requests are running: abort them, wait, or pause with mode retract")
        if not tags:
            await _respond(send, 200, None)
            return
        if not self.released & {"kv_cache", "weights"}:
            await self._flush(call)  # also waits until the scheduler is idle, which releasing takes for granted
        call.body = orjson.dumps({**call.json(), "tags": tags})
        if await call.forward(send) == 200:
            self.released |= set(tags)

    async def resume_memory(self, call: Call, send: Send) -> None:
        tags = [tag for tag in _tags(call) if tag in self.released]
        if not tags:
            await _respond(send, 200, None)
            return
        call.body = orjson.dumps({**call.json(), "tags": tags})
        if await call.forward(send) == 200:
            self.released -= set(tags)
            if "weights" in tags and not self.keeps_released_weights:
                self.weights_missing = True

    # -- weights ------------------------------------------------------------------------------------------------------

    async def begin_update(self, call: Call, send: Send) -> None:
        if self.released & {"weights"}:
            raise Refused("the weights are released: POST /resume_memory_occupation first")
        if self.updating or not self.release.has_update_session:  # a lost trainer may have left one open
            await _respond(send, 200, {"success": True, "message": "Success"})
            status = 200
        else:
            status = await call.forward(send)
        if status == 200:
            self.updating, self.pushed = True, False

    async def end_update(self, call: Call, send: Send) -> None:
        if not self.updating:
            raise Refused("no weight update is open: POST /begin_weight_update first")
        if self.release.has_update_session:
            status = await call.forward(send)
        else:
            await _respond(send, 200, {"success": True, "message": "Success"})
            status = 200
        if status == 200:
            self.updating = False
            if self.pushed:
                self.weights_missing = False

    async def update_weights(self, call: Call, send: Send) -> None:
        if call.path in NEEDS_SESSION and not self.updating:
            raise Refused(f"{call.path[1:]} must run between begin_weight_update and end_weight_update")
        if self.released & {"weights"}:
            raise Refused("the weights are released: POST /resume_memory_occupation first")
        if self.running and self.pause_mode == "retract" and not self.release.flushes_while_held:
            raise Refused(
                f"{self.running} requests are held, and SGLang {self.release.version} would compute them again from "
                "the old weights' prefix cache: pause with mode abort and send them again"
            )
        keeps_cache = self._keep_cache_if_held(call)
        if await call.forward(send) != 200:
            return
        if call.path in NEEDS_SESSION:
            self.pushed = True
        else:
            self.weights_missing = False
        if not keeps_cache:
            self._cache_emptied()
        elif not self.cache_is_empty:
            self.cache_key += 1

    def _keep_cache_if_held(self, call: Call) -> bool:
        """Whether the prefix cache outlives this update; the flush is taken out where requests still need it."""
        body = call.json()
        if not body.get("flush_cache", True):
            return True
        if self._may_flush or self.pause_mode is None:  # not paused: SGLang waits until nothing runs
            return False
        call.body = orjson.dumps({**body, "flush_cache": False})
        return True

    async def check_weights(self, call: Call, send: Send) -> None:
        if self.released & {"weights"}:
            raise Refused("the weights are released: nothing to check")
        status = await call.forward(send)
        if status == 200 and call.json().get("action") == "reset_tensors":
            self.weights_missing = True
            self.cache_key += not self.cache_is_empty

    async def weight_version(self, scope: dict[str, Any], send: Send) -> None:
        _, info = await Call(self.app, scope, b"").inside("GET", "/get_model_info")
        await _respond(send, 200, {"weight_version": orjson.loads(info)["weight_version"]})


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
        await self.app(*_with_body(self.scope, self.body or b"{}", _disconnected), watch)
        return status

    async def inside(self, method: str, path: str) -> tuple[int, bytes]:
        """Another request to SGLang in the name of this one: (status, reply)."""
        status, parts = 0, []

        async def collect(message: dict[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                parts.append(message.get("body", b""))

        scope = {**self.scope, "method": method, "path": path, "raw_path": path.encode(), "query_string": b""}
        await self.app(*_with_body(scope, b"", _disconnected), collect)
        return status, b"".join(parts)


async def _disconnected() -> dict[str, Any]:
    """Control calls run to their end, whether the caller waits or not."""
    await asyncio.Event().wait()
    return {"type": "http.disconnect"}


async def _read(receive: Receive) -> bytes:
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Refused("the client went away", status=499)
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


def _with_body(scope: dict[str, Any], body: bytes, rest: Receive) -> tuple[dict[str, Any], Receive]:
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


async def _respond(send: Send, status: int, content: Any = b"") -> None:
    body = content if isinstance(content, bytes) else orjson.dumps(content)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _tags(call: Call) -> list[str]:
    tags = call.json().get("tags")
    if tags is None:
        return list(MEMORY_TAGS)
    if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
        raise Refused("tags must be a list of strings")
    unknown = sorted(set(tags) - set(MEMORY_TAGS))
    if unknown:
        raise Refused(f"unknown memory tags {unknown}; known: {', '.join(MEMORY_TAGS)}")
    return tags
