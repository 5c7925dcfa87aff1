"""What a generation request may contain: SGLang's scheduler ends at the first token id that it does not know."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import orjson

from slime.backends.sglang_utils.asgi import Refused


def read_vocab_size(model_path: str) -> int | None:
    """Entries of the embedding table by the checkpoint's config.json; None where that does not say."""
    path = Path(model_path) / "config.json"
    if not path.is_file():
        return None
    config = json.loads(path.read_text())
    size = config.get("vocab_size", (config.get("text_config") or {}).get("vocab_size"))
    return size if isinstance(size, int) else None


def object_in(body: bytes) -> dict[str, Any]:
    """A request's fields; none where the body is no JSON object, about which SGLang's own answer is right."""
    try:
        request = orjson.loads(body)
    except ValueError:
        return {}
    return request if isinstance(request, dict) else {}


class RequestRules:
    """Raises `Refused` for requests that would harm the server, or be answered as something else.

    Args:
        vocab_size: of the model; None: unknown, any id from 0 on passes.
        sampling_fields: what may stand in `sampling_params`.
    """

    def __init__(self, vocab_size: int | None, sampling_fields: frozenset[str]):
        self.vocab_size = vocab_size
        self.sampling_fields = sampling_fields

    def check_generate(self, body: bytes) -> None:
        """A body of /generate."""
        request = object_in(body)
        self._check_token_ids("input_ids", request.get("input_ids"))
        given = request.get("sampling_params")
        for params in given if isinstance(given, list) else [given]:
            unknown = sorted(set(params) - self.sampling_fields) if isinstance(params, dict) else []
            if unknown:
                raise Refused(f"sampling_params: unknown field {unknown[0]!r}")

    def check_completion(self, body: bytes) -> None:
        """A body of /v1/completions: OpenAI's prompts are texts, or token ids."""
        prompt = object_in(body).get("prompt")
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], str):
            self._check_token_ids("prompt", prompt)

    def _check_token_ids(self, field: str, ids: Any) -> None:
        if not ids or not isinstance(ids, list):
            return
        for prompt in ids if isinstance(ids[0], list) else [ids]:
            if not isinstance(prompt, list) or set(map(type, prompt)) != {int}:
                raise Refused(f"{field} must be a non-empty list of integers, or a list of such lists")
            low, high = min(prompt), max(prompt)
            if low < 0 or (self.vocab_size is not None and high >= self.vocab_size):
                bad = low if low < 0 else high
                raise Refused(f"{field}: token id {bad} is outside the vocabulary of {self.vocab_size}")
