"""Token-in, token-out for clients that speak text.

An agent that sends each turn as text would have earlier turns tokenised anew, and the trainer would see other tokens
than those that were generated. This middleware remembers of every /generate which tokens a text stands for: the known
beginning of the next turn's text is sent to the engine as exactly these tokens, and only the rest is tokenised.
POST /retrieve_from_text then answers with tokens, log-probs and loss mask (1 = generated) of a whole conversation.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from slime.router.middleware_hub import payload_of, replace
from slime.router.middleware_hub.radix_tree import Entry, RadixTree
from slime.router.proxy import ON_CHUNK, error_response
from slime.utils.processing_utils import load_tokenizer

logger = logging.getLogger(__name__)


class RadixTreeMiddleware:
    """See the module. Batched requests and multimodal ones pass through unchanged."""

    def __init__(self, app: web.Application, *, router: Any) -> None:
        self.router = router
        self.tokenizer = load_tokenizer(router.args.hf_checkpoint, router.args.trust_remote_code)
        self.special_ids = frozenset(self.tokenizer.all_special_ids)
        self.tree = RadixTree()

    async def dispatch(
        self, request: web.Request, call_next: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if request.method == "POST" and request.path == "/retrieve_from_text":
            return await self.retrieve_from_text(request)
        if request.method != "POST" or request.path != "/generate":
            return await call_next(request)
        payload = await payload_of(request)
        if payload is None or payload.get("image_data"):
            return await call_next(request)
        known = self._input(payload)
        if known is None:
            return await call_next(request)
        text, entry, rest = known
        tokens = [*([] if entry is None else entry.all_tokens()), *rest]
        sent = {key: value for key, value in payload.items() if key != "text"}
        replace(request, {**sent, "input_ids": tokens, "return_logprob": True})
        last_chunk = _LastEvent()
        request[ON_CHUNK] = last_chunk.feed
        response = await call_next(request)
        reply = last_chunk.value if payload.get("stream") else _reply_of(response)
        if reply is not None:
            self._remember(text, entry, rest, reply)
        return response

    # -- in -----------------------------------------------------------------------------------------------------------

    def _input(self, payload: dict[str, Any]) -> tuple[str, Entry | None, list[int]] | None:
        """Text of the request, what is known of its beginning, and the tokens of the rest. None for batches."""
        text, ids = payload.get("text"), payload.get("input_ids")
        if isinstance(text, str):
            entry = self.tree.find(text)
            return text, entry, self._encode(text[0 if entry is None else entry.text_length :])
        if not isinstance(ids, list) or not all(isinstance(token, int) for token in ids):
            return None
        text = self.tokenizer.decode(ids, skip_special_tokens=False)
        entry = self.tree.find(text)
        # The client's own tokens are exact; they win over what another request has made of the same text.
        while entry is not None and (known := entry.all_tokens()) != ids[: len(known)]:
            entry = entry.parent
        return text, entry, ids[0 if entry is None else len(entry.all_tokens()) :]

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False) if text else []

    # -- out ----------------------------------------------------------------------------------------------------------

    def _remember(self, text: str, entry: Entry | None, rest: list[int], reply: dict[str, Any]) -> None:
        meta = reply.get("meta_info") or {}
        scored = meta.get("output_token_logprobs") or []
        tokens, log_probs = [item[1] for item in scored], [item[0] for item in scored]
        version = _version(meta.get("weight_version"))
        if rest:
            entry = self.tree.insert(text, entry, rest, [0.0] * len(rest), [0] * len(rest), version)
        if not tokens:
            return
        # What the client sees may lack the special tokens at the end, or a stop string that was cut off.
        shown, body = reply.get("text") or "", len(tokens)
        while body and tokens[body - 1] in self.special_ids:
            body -= 1
        hidden = self.tokenizer.decode(tokens[body:], skip_special_tokens=False)
        if hidden and shown.endswith(hidden):
            shown = shown[: -len(hidden)]
        whole = text + shown
        generated = entry
        if body:
            generated = self.tree.insert(whole, entry, tokens[:body], log_probs[:body], [1] * body, version)
        if body < len(tokens):
            count = len(tokens) - body
            tail = self.tree.insert(whole + hidden, generated, tokens[body:], log_probs[body:], [1] * count, version)
            if generated is not None:
                generated.tail = tail

    async def retrieve_from_text(self, request: web.Request) -> web.Response:
        """Tokens of a conversation: exact where it went through here, tokenised (mask 0) where it did not."""
        payload = await payload_of(request)
        text = None if payload is None else payload.get("text")
        if not isinstance(text, str) or not text:
            return error_response(400, "/retrieve_from_text needs {'text': '...'}")
        entry = self.tree.find(text)
        rest = self._encode(text[0 if entry is None else entry.text_length :])
        if entry is not None and not rest and entry.tail is not None:
            entry = entry.tail
        chain = [] if entry is None else entry.chain()
        tokens = [token for piece in chain for token in piece.tokens] + rest
        loss_mask = [value for piece in chain for value in piece.loss_mask] + [0] * len(rest)
        log_probs = [value for piece in chain for value in piece.log_probs] + [0.0] * len(rest)
        return web.json_response(
            {
                "tokens": tokens,
                "response": text,
                "loss_mask": loss_mask,
                "token_length": len(tokens),
                "loss_mask_length": len(loss_mask),
                "rollout_logp": log_probs,
            }
        )


class _LastEvent:
    """The last complete object of a stream of server-sent events; chunks are cumulative."""

    def __init__(self) -> None:
        self.value: dict[str, Any] | None = None
        self._buffer = b""

    def feed(self, chunk: bytes) -> None:
        *events, self._buffer = (self._buffer + chunk).split(b"\n\n")
        data = [event.removeprefix(b"data: ") for event in events if event.startswith(b"data: {")]
        if data:
            self.value = json.loads(data[-1])


def _reply_of(response: web.StreamResponse) -> dict[str, Any] | None:
    if not isinstance(response, web.Response) or response.status != 200:
        return None
    reply = json.loads(response.body)
    return reply if isinstance(reply, dict) else None


def _version(raw: Any) -> int | None:
    return int(raw) if isinstance(raw, (int, str)) and str(raw).isdigit() else None
