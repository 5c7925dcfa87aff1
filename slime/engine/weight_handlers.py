"""HTTP endpoints that replace or check weights."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from aiohttp import web

from slime.engine import payload
from slime.engine.engine import Engine
from slime.engine.protocol import RequestError
from slime.engine.weight_groups import WeightGroups
from slime.weight_sync.disk_pull import PullError, pull


async def _json(request: web.Request) -> dict[str, Any]:
    from slime.engine.handlers import json_body

    return await json_body(request)


def _success(**more: Any) -> web.Response:
    return web.json_response({"success": True, "message": "Succeeded.", **more})


class WeightHandlers:
    """Each update runs in the engine's thread, between two steps, and starts a new prefix-cache chain."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.groups = WeightGroups(engine.device)
        self.model_path = ""
        self.updating = False

    def register(self, app: web.Application) -> None:
        post = app.router.add_post
        post("/update_weights_from_tensor", self._endpoint(self.from_tensor))
        post("/update_weights_from_distributed", self._endpoint(self.from_distributed))
        post("/update_weights_from_disk", self._endpoint(self.from_disk))
        post("/pull_weights", self.pull)
        post("/init_weights_update_group", self.init_group)
        post("/destroy_weights_update_group", self._endpoint(self.destroy_group))
        post("/begin_weight_update", self._endpoint(self.begin))
        post("/end_weight_update", self._endpoint(self.end))
        post("/update_weight_version", self._endpoint(self.update_version))
        post("/weights_checker", self._endpoint(self.check))

    def _endpoint(self, function: Callable[[dict[str, Any]], dict[str, Any] | None]):
        async def handle(request: web.Request) -> web.Response:
            body = await _json(request)
            more = await asyncio.wrap_future(self.engine.call(function, body))
            return _success(**(more or {}))

        return handle

    async def init_group(self, request: web.Request) -> web.Response:
        """Join a group. In a thread of its own: another member that died would hold the engine up for minutes."""
        await asyncio.wrap_future(_in_daemon_thread(self.groups.init, await _json(request)))
        return _success()

    async def pull(self, request: web.Request) -> web.Response:
        """Bring this host's checkpoint to a published version; the engine goes on meanwhile and loads nothing yet."""
        body = await _json(request)
        try:
            places = str(body["local_checkpoint_dir"]), str(body["source_dir"]), int(body["target_version"])
        except (KeyError, TypeError, ValueError) as error:
            raise RequestError(f"missing or bad field: {error}") from error
        try:
            path = await asyncio.to_thread(pull, *places)
        except PullError as error:
            raise RequestError(str(error), status=409) from error
        return _success(model_path=str(path))

    # In the engine's thread.

    def from_tensor(self, body: dict[str, Any]) -> None:
        self._require_session("update_weights_from_tensor")
        serialized = body.get("serialized_named_tensors")
        if isinstance(serialized, str):
            serialized = [serialized]
        if not isinstance(serialized, list) or len(serialized) != 1:
            raise RequestError("serialized_named_tensors must be a list with the payload of this engine's one rank")
        load_format = body.get("load_format")
        if load_format not in payload.LOAD_FORMATS:
            raise RequestError(f"load_format {load_format!r} is not supported; use flattened_bucket or none")
        flush, version = _flush(body), _version(body)
        content = payload.loads(serialized[0])
        named = payload.unflatten_bucket(content) if load_format else payload.named_tensors(content)
        self.engine.weights.load(named)
        self.engine.weights_changed(version, flush)

    def from_distributed(self, body: dict[str, Any]) -> None:
        self._require_session("update_weights_from_distributed")
        flush, version = _flush(body), _version(body)
        self.groups.receive(body, self.engine.weights)
        self.engine.weights_changed(version, flush)

    def from_disk(self, body: dict[str, Any]) -> None:
        flush, version = _flush(body), _version(body)
        self.engine.weights.load_directory(body.get("model_path"))
        self.model_path = body["model_path"]
        self.engine.weights_changed(version, flush)

    def destroy_group(self, body: dict[str, Any]) -> None:
        self.groups.destroy(body.get("group_name", "weight_update_group"))

    def _require_session(self, what: str) -> None:
        if not self.updating:
            raise RequestError(f"{what} must run between begin_weight_update and end_weight_update")

    def begin(self, body: dict[str, Any]) -> None:
        self.updating = True  # one that a lost trainer left open is simply begun again

    def end(self, body: dict[str, Any]) -> None:
        if not self.updating:
            raise RequestError("no weight update is open: POST /begin_weight_update first")
        self.updating = False

    def update_version(self, body: dict[str, Any]) -> dict[str, Any]:
        version = body.get("new_version")
        if not isinstance(version, (str, int)) or isinstance(version, bool):
            raise RequestError(f"new_version must be a string, got {version!r}")
        if body.get("abort_all_requests", True):
            self.engine.abort(None)
        self.engine.set_version(str(version))
        return {"new_version": str(version)}

    def check(self, body: dict[str, Any]) -> dict[str, Any]:
        more = self.engine.weights.check(body.get("action"))
        if body.get("action") == "reset_tensors":
            self.engine.weights_changed(None, flush_cache=True)
        return more


def _in_daemon_thread(function: Callable[..., Any], *args: Any) -> Future:
    """Run `function` in a thread that does not keep the server alive."""
    future: Future = Future()
    future.set_running_or_notify_cancel()

    def work() -> None:
        try:
            future.set_result(function(*args))
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=work, name="join-group", daemon=True).start()
    return future


def _flush(body: dict[str, Any]) -> bool:
    flush = body.get("flush_cache", True)
    if not isinstance(flush, bool):
        raise RequestError(f"flush_cache must be true or false, got {flush!r}")
    return flush


def _version(body: dict[str, Any]) -> str | None:
    version = body.get("weight_version")
    if version is not None and (not isinstance(version, (str, int)) or isinstance(version, bool)):
        raise RequestError(f"weight_version must be a string, got {version!r}")
    return None if version is None else str(version)
