"""Which requests reach SGLang at all: a token id outside the vocabulary ends its scheduler, whatever the path."""

import json

import pytest

pytest.importorskip("orjson", reason="a dependency of SGLang")

from slime.backends.sglang_utils.asgi import respond
from slime.backends.sglang_utils.compat import Release
from slime.backends.sglang_utils.front import Front

pytestmark = pytest.mark.unit


async def post(model_dir: str, path: str, body: dict) -> tuple[int, str]:
    """(status, reply) of the front before an application that answers everything with 200."""
    parts = []

    async def answered(scope, receive, send):
        await respond(send, 200)

    async def receive():
        return {"type": "http.request", "body": json.dumps(body).encode()}

    async def send(message):
        parts.append(message)

    release = Release("unknown", frozenset(), flushes_while_held=False)
    front = Front(answered, release, model_dir, False, True, frozenset({"max_new_tokens"}))
    await front({"type": "http", "path": path, "method": "POST", "headers": []}, receive, send)
    return parts[0]["status"], b"".join(part.get("body", b"") for part in parts).decode()


@pytest.mark.parametrize("prompt", ["128", ["128", "x"], [5, 127], [[5], [127]], None])
async def test_prompts_of_completions_pass(tiny_model_dir, prompt):
    assert await post(tiny_model_dir, "/v1/completions", {"prompt": prompt}) == (200, "")


@pytest.mark.parametrize(
    "prompt, words", [([5, 128], "token id 128"), ([[5], [-1]], "token id -1"), ([[5], "x"], "integers")]
)
async def test_token_ids_of_completions_are_looked_at(tiny_model_dir, prompt, words):
    status, reply = await post(tiny_model_dir, "/v1/completions", {"prompt": prompt})
    assert status == 400 and words in reply and "prompt" in reply
    status, reply = await post(tiny_model_dir, "/generate", {"input_ids": prompt})
    assert status == 400 and words in reply and "input_ids" in reply
