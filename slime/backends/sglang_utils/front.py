"""In front of SGLang's HTTP application: what would kill a stock server or serve wrong tokens is answered here.

The rules, each seen with a stock release:
- A token id outside the vocabulary ends the scheduler: refused with 400.
- While weights or KV cache are released, or weights came back without content, a generation (also a health check that
  generates) crashes or answers from zeros: refused with 503; health checks do not generate.
- Releasing memory while requests run, taking back what was not released, or flushing a cache that held requests use,
  ends the scheduler: refused, left out, or done without the flush.
- A prefix cache that outlives a weight update serves old KV: it is flushed, and where that cannot be done later
  requests are keyed apart from it.
- A weight payload that is no list of tensors, or with a tensor of another shape, ends the scheduler: refused.

It also evens out releases: all speak the API of the newest (`compat.Release` knows what is missing). A request that
nothing concerns passes through unchanged; only token ids and the names of sampling parameters are looked at.
"""

from __future__ import annotations

import asyncio
from typing import Any

import orjson

from slime.backends.sglang_utils.asgi import Call, Receive, Refused, Send, read, respond, with_body
from slime.backends.sglang_utils.compat import Release
from slime.backends.sglang_utils.payloads import check_payload, check_shapes, checkpoint_shapes
from slime.backends.sglang_utils.request_rules import RequestRules, object_in, read_vocab_size
from slime.weight_sync.disk_pull import PullError, pull

MEMORY_TAGS = ("kv_cache", "weights", "cuda_graph")
FLUSH_PATIENCE_SECS = 60.0
FLUSH_INTERVAL_SECS = 0.05
GENERATING = ("/generate", "/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses")
NEEDS_SESSION = ("/update_weights_from_tensor", "/update_weights_from_distributed")


class Front:
    """ASGI middleware around SGLang's application.

    Args:
        app: the application inside.
        model_path: checkpoint whose vocabulary bounds token ids.
        keeps_released_weights: the server runs with `--enable-weights-cpu-backup`.
        on_cpu: it runs without CUDA.
        sampling_fields: what may stand in `sampling_params`.
    """

    def __init__(
        self,
        app: Any,
        release: Release,
        model_path: str,
        keeps_released_weights: bool,
        on_cpu: bool,
        sampling_fields: frozenset[str],
    ):
        self.app = app
        self.rules = RequestRules(read_vocab_size(model_path), sampling_fields)
        self.release = release
        self.on_cpu = on_cpu
        self.checksums: dict[str, str] = {}
        self.shapes = checkpoint_shapes(model_path)
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
                await respond(send, 200)
            elif path in ("/get_weight_version", "/weight_version"):  # withdrawn by SGLang
                await self.weight_version(scope, send)
            elif path == "/pull_weights":
                await self.pull_weights(await read(receive), send)
            elif path in self._handlers:
                body = await read(receive)
                async with self._control:
                    await self._handlers[path](Call(self.app, scope, body), send)
            else:
                await self.app(scope, receive, send)
        except Refused as refusal:
            error = {"object": "error", "error": {"message": str(refusal), "code": refusal.status}}
            await respond(send, refusal.status, error)

    async def pull_weights(self, body: bytes, send: Send) -> None:
        """Bring this host's checkpoint to a published version; SGLang loads it with /update_weights_from_disk."""
        try:
            request = orjson.loads(body)
            places = request["local_checkpoint_dir"], request["source_dir"], int(request["target_version"])
        except (KeyError, TypeError, ValueError) as error:
            raise Refused(f"missing or bad field: {error!r}") from error
        try:
            path = await asyncio.to_thread(pull, *places)
        except PullError as error:
            raise Refused(str(error), status=409) from error
        await respond(send, 200, {"success": True, "message": "Succeeded.", "model_path": str(path)})

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
        body = await read(receive)
        if scope["path"] == "/generate":
            self.rules.check_generate(body)
        elif scope["path"] == "/v1/completions":
            self.rules.check_completion(body)
        self._refuse_unless_serving()
        while not self._serving.is_set():
            await self._serving.wait()
            self._refuse_unless_serving()
        if self.cache_key:
            body = self._with_cache_key(body)
        self.cache_is_empty = False
        self.running += 1
        try:
            await self.app(*with_body(scope, body, receive), send)
        finally:
            self.running -= 1

    def _refuse_unless_serving(self) -> None:
        reason = self._not_serving
        if reason:
            raise Refused(reason, status=503)

    def _with_cache_key(self, body: bytes) -> bytes:
        """The request, unable to use the prefix cache of weights that are gone."""
        request = object_in(body)
        if not request:
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
            await respond(send, 200, None)
            return
        if not self.released & {"kv_cache", "weights"}:
            await self._flush(call)  # also waits until the scheduler is idle, which releasing takes for granted
        call.body = orjson.dumps({**call.json(), "tags": tags})
        if await call.forward(send) == 200:
            self.released |= set(tags)

    async def resume_memory(self, call: Call, send: Send) -> None:
        tags = [tag for tag in _tags(call) if tag in self.released]
        if not tags:
            await respond(send, 200, None)
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
            await respond(send, 200, {"success": True, "message": "Success"})
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
            await respond(send, 200, {"success": True, "message": "Success"})
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
        self._check_tensors(call)
        keeps_cache = self._keep_cache_if_held(call)
        if not keeps_cache and not self.running and not self.cache_is_empty:
            await self._flush(
                call
            )  # while the last request winds down SGLang updates, fails to flush, and answers 400
        if await call.forward(send) != 200:
            self.cache_key += not self.cache_is_empty  # it may have changed some of the weights
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

    def _check_tensors(self, call: Call) -> None:
        if call.path == "/update_weights_from_tensor":
            body = call.json()
            serialized = body.get("serialized_named_tensors")
            for payload in serialized if isinstance(serialized, list) else [serialized]:
                check_payload(payload, body.get("load_format"), self.shapes)
        elif call.path == "/update_weights_from_distributed":
            body = call.json()
            lists = [body.get(key) for key in ("names", "dtypes", "shapes")]
            if not all(isinstance(x, list) for x in lists) or len({len(x) for x in lists}) != 1:
                raise Refused("names, dtypes and shapes must be lists of one length")
            check_shapes(zip(lists[0], lists[2], strict=True), self.shapes)

    async def check_weights(self, call: Call, send: Send) -> None:
        if self.released & {"weights"}:
            raise Refused("the weights are released: nothing to check")
        action = call.json().get("action", "checksum")
        if action in ("snapshot", "compare") and self.on_cpu:
            await self._check_by_checksum(action, call, send)
            return
        status = await call.forward(send)
        if status == 200 and action == "reset_tensors":
            self.weights_missing = True
            self.cache_key += not self.cache_is_empty

    async def _check_by_checksum(self, action: str, call: Call, send: Send) -> None:
        """SGLang keeps its snapshot in pinned memory, which there is none of on CPU."""
        status, reply = await call.inside("POST", "/weights_checker", b'{"action": "checksum"}')
        if status != 200:
            raise Refused(f"checksums failed: {reply.decode(errors='replace')}")
        sums = {name: s for rank in orjson.loads(reply)["ranks"] for name, s in rank["checksums"].items()}
        if action == "snapshot":
            self.checksums = sums
        elif not self.checksums:
            raise Refused("compare needs a snapshot first")
        else:
            different = [name for name in sums if sums[name] != self.checksums.get(name)]
            if different:
                raise Refused(f"{len(different)} of {len(sums)} weights differ: {different[:8]}")
        await respond(send, 200, {"success": True, "message": "Success."})

    async def weight_version(self, scope: dict[str, Any], send: Send) -> None:
        _, info = await Call(self.app, scope, b"").inside("GET", "/get_model_info")
        await respond(send, 200, {"weight_version": orjson.loads(info)["weight_version"]})


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
