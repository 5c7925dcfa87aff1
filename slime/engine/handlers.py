"""HTTP endpoints on top of an `Engine`."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from argparse import Namespace
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from slime.engine.detokenize import IncrementalDetokenizer
from slime.engine.engine import MEMORY_TAGS, Engine
from slime.engine.profiling import Profiling
from slime.engine.protocol import GenerateRequest, Request, RequestError, SamplingParams, parse_generate
from slime.engine.replies import final_reply, partial_reply
from slime.engine.sequence import Sequence
from slime.engine.weight_handlers import WeightHandlers

logger = logging.getLogger(__name__)

HEALTH_GENERATE_SECONDS = 20.0


def error_response(message: str, status: int) -> web.Response:
    body = {"object": "error", "error": {"message": message, "code": status}}
    return web.json_response(body, status=status)


@web.middleware
async def errors_as_json(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except RequestError as error:
        return error_response(str(error), error.status)
    except web.HTTPException as error:
        return error_response(error.reason, error.status)
    except Exception as error:
        logger.exception("%s failed", request.path)
        return error_response(f"{type(error).__name__}: {error}", 500)


async def json_body(request: web.Request) -> dict[str, Any]:
    """The JSON object of a request; an empty body is an empty object."""
    data = await request.read()
    if not data:
        return {}
    try:
        body = json.loads(data)
    except ValueError as error:
        raise RequestError(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    return body


class EngineHandlers:
    """All endpoints of one engine.

    Args:
        args: the server's command line, shown by /get_server_info.
    """

    def __init__(self, engine: Engine, args: Namespace):
        self.engine = engine
        self.args = args
        self.profiling = Profiling()
        self.weights = WeightHandlers(engine)
        self.weights.model_path = args.model_path

    def register(self, app: web.Application) -> None:
        app.middlewares.append(errors_as_json)
        get, post = app.router.add_get, app.router.add_post
        post("/generate", self.generate)
        post("/abort_request", self.abort_request)
        post("/pause_generation", self.pause_generation)
        post("/continue_generation", self.continue_generation)
        for add in (get, post):
            add("/flush_cache", self.flush_cache)
        for path in ("/health", "/ready", "/readiness"):
            get(path, self.health)
        get("/health_generate", self.health_generate)
        for path in ("/model_info", "/get_model_info"):
            get(path, self.model_info)
        for path in ("/server_info", "/get_server_info"):
            get(path, self.server_info)
        for path in ("/weight_version", "/get_weight_version"):
            get(path, self.weight_version)
        get("/v1/loads", self.loads)
        get("/v1/models", self.models)
        post("/release_memory_occupation", self.release_memory)
        post("/resume_memory_occupation", self.resume_memory)
        post("/start_profile", self.start_profile)
        post("/stop_profile", self.stop_profile)
        self.weights.register(app)

    async def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.wrap_future(self.engine.call(function, *args))

    # Generation.

    async def generate(self, request: web.Request) -> web.StreamResponse:
        engine = self.engine
        parsed = parse_generate(await json_body(request), engine.tokenizer, engine.vocab_size, engine.max_context)
        if parsed.stream:
            return await self._stream(request, parsed)
        seqs = await self._finish(parsed.requests)
        replies = [final_reply(seq, engine.tokenizer, engine.weight_version) for seq in seqs]
        failed = next((s.finish_reason for s in seqs if s.finish_reason.get("status_code") == 500), None)
        if failed:
            raise RequestError(f"the engine failed: {failed['message']}", status=500)
        return web.json_response(replies[0] if parsed.single else replies)

    async def _finish(self, requests: list[Request]) -> list[Sequence]:
        """Run requests to their end; aborts them when the client goes away."""
        loop, done = asyncio.get_running_loop(), asyncio.Event()
        left = len(requests)

        def on_output(seq: Sequence) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                loop.call_soon_threadsafe(done.set)

        seqs = await self._submit(requests, False, on_output)
        try:
            await done.wait()
        except asyncio.CancelledError:
            self._forget(requests)
            raise
        return seqs

    async def _submit(self, requests: list[Request], stream: bool, on_output) -> list[Sequence]:
        future = self.engine.call(self.engine.submit, requests, stream, on_output)
        try:
            return await asyncio.shield(asyncio.wrap_future(future))
        except asyncio.CancelledError:
            self._forget(requests)
            raise

    def _forget(self, requests: list[Request]) -> None:
        for request in requests:
            self.engine.call(self.engine.abort, request.rid, "Client disconnected")

    async def _stream(self, request: web.Request, parsed: GenerateRequest) -> web.StreamResponse:
        """Server-sent events; each chunk holds everything so far."""
        loop, engine, events = asyncio.get_running_loop(), self.engine, asyncio.Queue()

        def on_output(seq: Sequence) -> None:
            loop.call_soon_threadsafe(events.put_nowait, seq)

        seqs = await self._submit(parsed.requests, True, on_output)
        index = {seq: i for i, seq in enumerate(seqs)}
        texts = {seq: IncrementalDetokenizer(engine.tokenizer, seq.params) for seq in seqs}
        sent = dict.fromkeys(seqs, -1)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        left = len(seqs)
        try:
            await response.prepare(request)
            while left:
                seq = await events.get()
                # The engine goes on meanwhile: take what is there now, once.
                finished, count = seq.finish_reason is not None, seq.num_output
                if finished and not _marked(sent, seq):
                    reply = final_reply(seq, engine.tokenizer, engine.weight_version)
                    left -= 1
                elif not finished and count > sent[seq]:
                    sent[seq] = count
                    text = texts[seq].feed(seq.token_ids[seq.prompt_len : seq.prompt_len + count])
                    reply = partial_reply(seq, count, text, engine.weight_version)
                else:
                    continue
                if not parsed.single:
                    reply["index"] = index[seq]
                await response.write(b"data: " + json.dumps(reply).encode() + b"\n\n")
            await response.write(b"data: [DONE]\n\n")
        except (asyncio.CancelledError, ConnectionError):
            self._forget(parsed.requests)
            raise
        return response

    async def abort_request(self, request: web.Request) -> web.Response:
        body = await json_body(request)
        rid = body.get("rid")
        if not body.get("abort_all", False) and not isinstance(rid, str):
            raise RequestError("give rid or abort_all")
        await self._call(self.engine.abort, None if body.get("abort_all") else rid)
        return web.Response()

    async def pause_generation(self, request: web.Request) -> web.Response:
        body = await json_body(request)
        await self._call(self.engine.pause, body.get("mode", "abort"))
        return web.json_response({"status": "ok", "message": "Generation paused."})

    async def continue_generation(self, request: web.Request) -> web.Response:
        await self._call(self.engine.resume)
        return web.json_response({"status": "ok", "message": "Generation continued."})

    async def flush_cache(self, request: web.Request) -> web.Response:
        await self._call(self.engine.flush_cache)
        return web.Response(text="Cache flushed.\n")

    # Information.

    async def health(self, request: web.Request) -> web.Response:
        if not self.engine.alive:
            return error_response("the engine has stopped", 503)
        return web.Response()

    async def health_generate(self, request: web.Request) -> web.Response:
        """Generate a token. An engine that is paused or released on purpose is healthy."""
        engine = self.engine
        if not engine.alive:
            return error_response("the engine has stopped", 503)
        if engine.paused or engine.not_serving:
            return web.Response()
        params = SamplingParams(max_new_tokens=1, temperature=0.0)
        probe = Request(f"HEALTH_CHECK_{time.time_ns()}", [0], params)
        before = engine.num_steps
        try:
            await asyncio.wait_for(self._finish([probe]), HEALTH_GENERATE_SECONDS)
        except asyncio.TimeoutError:
            if engine.num_steps == before:
                return error_response(f"no step in {HEALTH_GENERATE_SECONDS:.0f} s", 503)
        return web.Response()

    async def model_info(self, request: web.Request) -> web.Response:
        engine = self.engine
        return web.json_response(
            {
                "model_path": self.weights.model_path,
                "tokenizer_path": self.args.model_path,
                "is_generation": True,
                "weight_version": engine.weight_version,
                "model_type": engine.weights.model.config.model_type,
                "architectures": engine.weights.model.config.architectures,
                "vocab_size": engine.vocab_size,
                "max_context": engine.max_context,
            }
        )

    async def server_info(self, request: web.Request) -> web.Response:
        engine = self.engine
        state = engine.load()
        info = {**vars(self.args), "engine": "embedded", "weight_version": engine.weight_version}
        info["max_total_num_tokens"] = state["max_total_num_tokens"]
        info["max_context"] = engine.max_context
        info["kv_cache_bytes"] = engine.memory.nbytes
        info["internal_states"] = [state]
        info["integrity"] = await self._call(engine.integrity)
        return web.json_response(info)

    async def weight_version(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.engine.weight_version})

    async def loads(self, request: web.Request) -> web.Response:
        load = {"dp_rank": 0, **self.engine.load()}
        load["num_total_reqs"] = load["num_running_reqs"] + load["num_waiting_reqs"]
        load["token_usage"] = load["num_used_tokens"] / load["max_total_num_tokens"]
        aggregate = {
            "total_running_reqs": load["num_running_reqs"],
            "total_waiting_reqs": load["num_waiting_reqs"],
            "total_reqs": load["num_total_reqs"],
        }
        return web.json_response(
            {"timestamp": time.time(), "dp_rank_count": 1, "loads": [load], "aggregate": aggregate}
        )

    async def models(self, request: web.Request) -> web.Response:
        entry = {"id": self.weights.model_path, "object": "model", "max_model_len": self.engine.max_context}
        return web.json_response({"object": "list", "data": [entry]})

    # Memory and profiles.

    async def release_memory(self, request: web.Request) -> web.Response:
        await self._call(self.engine.release_memory, _tags(await json_body(request)))
        return web.json_response(None)

    async def resume_memory(self, request: web.Request) -> web.Response:
        await self._call(self.engine.resume_memory, _tags(await json_body(request)))
        return web.json_response(None)

    async def start_profile(self, request: web.Request) -> web.Response:
        await self._call(self.profiling.start, await json_body(request))
        return web.Response(text="Start profiling.\n")

    async def stop_profile(self, request: web.Request) -> web.Response:
        path = await self._call(self.profiling.stop)
        return web.Response(text=f"Stop profiling: {path}\n")


def _marked(sent: dict[Sequence, int], seq: Sequence) -> bool:
    """Whether the end of the sequence has been sent; marks it."""
    if sent[seq] is None:
        return True
    sent[seq] = None
    return False


def _tags(body: dict[str, Any]) -> list[str]:
    tags = body.get("tags")
    if tags is None:
        return list(MEMORY_TAGS)
    if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
        raise RequestError("tags must be a list of strings")
    return tags
