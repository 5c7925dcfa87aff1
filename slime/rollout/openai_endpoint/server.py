"""The HTTP side: /v1/chat/completions and /v1/models per session, on the loopback of the rollout process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web

from slime.rollout.errors import RolloutError
from slime.rollout.openai_endpoint.session import ChatSession, Interrupted, Turn
from slime.utils.types import Sample

MODEL = "policy"
UNSUPPORTED = {"n": 1, "best_of": 1, "echo": False}
"""Request fields that must have these values if they are given."""


class _Server:
    """All sessions of one event loop behind one port, which opens with the first and closes with the last."""

    def __init__(self) -> None:
        self.sessions: dict[str, ChatSession] = {}
        self.runner: web.AppRunner | None = None
        self.url = ""
        self.lock = asyncio.Lock()

    async def add(self, session: ChatSession) -> str:
        async with self.lock:
            if self.runner is None:
                await self._start()
            key = secrets.token_urlsafe(12)
            self.sessions[key] = session
            session.base_url = f"{self.url}/{key}/v1"
            return key

    async def remove(self, key: str) -> None:
        async with self.lock:
            del self.sessions[key]
            if not self.sessions:
                runner, self.runner = self.runner, None
                await runner.cleanup()

    async def _start(self) -> None:
        app = web.Application(client_max_size=64 * 1024**2)
        app.router.add_post("/{session}/v1/chat/completions", self.chat_completions)
        app.router.add_get("/{session}/v1/models", self.models)
        self.runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.2)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        host, port = self.runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "slime"}]})

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        session = self.sessions.get(request.match_info["session"])
        if session is None:
            return _error(404, "there is no such session; it may have ended")
        try:
            body = await request.json()
            messages = body["messages"]
        except (ValueError, KeyError, TypeError):
            messages = None
        if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
            return _error(400, "the body must be a JSON object with a list of messages")
        for key, only in UNSUPPORTED.items():
            if body.get(key) not in (None, only):
                return _error(400, f"{key} must be {only}")
        stop = body.get("stop")
        try:
            turn = await session.complete(
                messages,
                tools=body.get("tools"),
                max_tokens=body.get("max_completion_tokens") or body.get("max_tokens"),
                stop=[stop] if isinstance(stop, str) else stop,
            )
        except Interrupted as error:
            return _error(503, str(error))
        except RolloutError as error:
            return _error(400, str(error))
        completion = _completion(session, turn)
        return await _stream(request, completion) if body.get("stream") else web.json_response(completion)


_servers: dict[asyncio.AbstractEventLoop, _Server] = {}


@contextlib.asynccontextmanager
async def open_session(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> AsyncIterator[ChatSession]:
    """A session for one sample: `base_url` (the OpenAI client's) answers until the block ends.

    Temperature and the other sampling parameters are the rollout's, whatever the agent asks for: the trainer computes
    with them. `max_tokens`, `stop`, `tools` and `stream` of a request count.
    """
    loop = asyncio.get_running_loop()
    for closed in [known for known in _servers if known.is_closed()]:
        del _servers[closed]
    server = _servers.setdefault(loop, _Server())
    session = ChatSession(args, sample, sampling_params)
    key = await server.add(session)
    try:
        yield session
    finally:
        await server.remove(key)


def _completion(session: ChatSession, turn: Turn) -> dict[str, Any]:
    """OpenAI's chat completion, with `prompt_token_ids` and `token_ids` beside it."""
    decode = session.tokenizer.decode
    scored = [
        {"token": decode([token]), "logprob": log_prob, "bytes": None, "top_logprobs": []}
        for token, log_prob in zip(turn.token_ids, turn.log_probs, strict=True)
    ]
    choice = {
        "index": 0,
        "message": turn.message,
        "finish_reason": turn.finish_reason,
        "logprobs": {"content": scored},
        "token_ids": turn.token_ids,
    }
    prompt, completion = len(turn.prompt_ids), len(turn.token_ids)
    return {
        "id": f"chatcmpl-{secrets.token_hex(8)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL,
        "choices": [choice],
        "prompt_token_ids": turn.prompt_ids,
        "usage": {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion},
    }


async def _stream(request: web.Request, completion: dict[str, Any]) -> web.StreamResponse:
    """The whole answer as one chunk: agents that only know streaming are served, none is served sooner."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    (choice,) = completion["choices"]
    message = dict(choice["message"])
    if "tool_calls" in message:
        message["tool_calls"] = [{"index": i, **call} for i, call in enumerate(message["tool_calls"])]
    chunk = {**completion, "object": "chat.completion.chunk"}
    chunk["choices"] = [{"index": 0, "delta": message, "finish_reason": choice["finish_reason"]}]
    await response.write(f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n".encode())
    await response.write_eof()
    return response


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "invalid_request_error"}}, status=status)
