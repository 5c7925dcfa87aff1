"""The text index, and conversations through the router with a real engine and tokenizer."""

import json
import random
from argparse import Namespace

import aiohttp
import pytest
from aiohttp import web

from slime.router.middleware_hub.radix_tree import RadixTree
from slime.router.server import Router
from slime.utils.processing_utils import load_tokenizer
from tests.engine.server_process import EngineServer
from tests.rollout.support import served

MIDDLEWARE = "slime.router.middleware_hub.radix_tree_middleware.RadixTreeMiddleware"


def insert(tree, text, parent=None, version=1, value=0):
    start = parent.text_length if parent else 0
    tokens = [value] * len(text[start:])
    return tree.insert(text, parent, tokens, [0.0] * len(tokens), [1] * len(tokens), version)


@pytest.mark.unit
def test_find_is_the_longest_known_prefix():
    """Against a plain dictionary, over random texts of a small alphabet that share many beginnings."""
    rng = random.Random(0)
    tree, known = RadixTree(), {}
    for _ in range(3000):
        text = "".join(rng.choice("ab<") for _ in range(rng.randrange(1, 14)))
        known[text] = insert(tree, text)
        query = text + "".join(rng.choice("ab<") for _ in range(3)) if rng.random() < 0.5 else text[:-1]
        expected = next((known[query[:n]] for n in range(len(query), 0, -1) if query[:n] in known), None)
        assert tree.find(query) is expected
    assert tree.num_entries == len(known)


@pytest.mark.unit
def test_pieces_of_a_conversation():
    tree = RadixTree()
    prompt = insert(tree, "question", value=1)
    answer = insert(tree, "question answer", prompt, value=2)
    insert(tree, "quest", value=9)  # splits the index, not the tokens
    turn = insert(tree, "question answer more", answer, value=3)
    assert tree.find("question answer more and more") is turn
    assert turn.all_tokens() == [1] * 8 + [2] * 7 + [3] * 5
    assert tree.find("question ans") is prompt and tree.find("other") is None
    with pytest.raises(ValueError, match="2 tokens, 1 log-probs"):
        tree.insert("x", None, [1, 2], [0.0], [1, 1], 1)


@pytest.mark.unit
def test_old_entries_are_collected():
    tree = RadixTree(max_entries=10, keep_versions=2)
    first = insert(tree, "a0", version=1)
    for i in range(1, 9):
        insert(tree, f"b{i}", version=1)
    insert(tree, "a0 continued", first, version=5)
    assert tree.num_entries == 10
    insert(tree, "c", version=6)
    # The conversation that goes on keeps its beginning.
    assert tree.num_entries == 3 and tree.find("a0") is first
    assert tree.find("a0 continued").all_tokens() == [0] * 12 and tree.find("b1") is None
    for i in range(2000):
        insert(tree, f"{i} text", version=6 + i // 10)
    assert tree.num_entries <= 30 + 11


@pytest.fixture(scope="module")
def engine(tiny_model_dir, tmp_path_factory):
    server = EngineServer(tiny_model_dir, tmp_path_factory.mktemp("engine")).wait()
    yield server
    server.stop()


async def ask(session, url, payload):
    async with session.post(url, json=payload) as reply:
        assert reply.status == 200, await reply.text()
        if payload.get("stream"):
            events = (await reply.text()).strip().split("\n\n")
            assert events[-1] == "data: [DONE]" and len(events) > 2
            return json.loads(events[-2].removeprefix("data: "))
        return await reply.json()


@pytest.mark.integration
@pytest.mark.parametrize("kind", ["text", "stream", "input_ids"])
async def test_turns_keep_their_tokens(engine, tiny_model_dir, kind):
    """Three turns; what the engine generated comes back token by token, whatever the tokenizer makes of the text."""
    tokenizer = load_tokenizer(tiny_model_dir, False)
    router = Router(
        middleware_paths=[MIDDLEWARE], args=Namespace(hf_checkpoint=tiny_model_dir, trust_remote_code=False)
    )
    router.pool.add(engine.url)
    text, tokens, mask, log_probs = "", [], [], []
    async with served(router.app()) as base, aiohttp.ClientSession() as session:
        for turn, question in enumerate(["what is the sum of 3 and 4 ?", " and what is 5 ?", " and 6 ?"]):
            added = tokenizer.encode(question, add_special_tokens=False)
            text += question
            tokens, mask, log_probs = tokens + added, mask + [0] * len(added), log_probs + [0.0] * len(added)
            params = {"max_new_tokens": 6, "sampling_seed": turn, "skip_special_tokens": turn == 1}
            payload = {"input_ids": tokens} if kind == "input_ids" else {"text": text}
            payload |= {"sampling_params": params, "stream": kind == "stream"}
            reply = await ask(session, f"{base}/generate", payload)
            assert reply["meta_info"]["prompt_tokens"] == len(tokens)
            text += reply["text"]
            for log_prob, token, _ in reply["meta_info"]["output_token_logprobs"]:
                tokens, mask, log_probs = [*tokens, token], [*mask, 1], [*log_probs, log_prob]
            if kind == "input_ids" and turn > 0:
                continue  # a word-level tokenizer's text of all ids is not the turns' texts one behind the other
            known = await ask(session, f"{base}/retrieve_from_text", {"text": text})
            assert known["tokens"] == tokens and known["loss_mask"] == mask and known["rollout_logp"] == log_probs
            assert known["token_length"] == known["loss_mask_length"] == len(tokens)
    if kind == "text":
        assert tokenizer.encode(text, add_special_tokens=False) != tokens  # so the middleware was needed


@pytest.mark.integration
async def test_hidden_end_of_turn_is_generated_once(tiny_model_dir):
    """The client does not see the end-of-turn token that the engine generated; its next turn's text spells it out."""
    tokenizer = load_tokenizer(tiny_model_dir, False)
    end = tokenizer.eos_token_id
    word = tokenizer.encode("sum", add_special_tokens=False)[0]
    inputs = []

    async def generate(request):
        payload = await request.json()
        inputs.append(payload["input_ids"])
        scored = [[-0.5, word, None], [-0.25, end, None]]
        return web.json_response(
            {"text": " sum", "meta_info": {"weight_version": "3", "output_token_logprobs": scored}}
        )

    app = web.Application()
    app.router.add_post("/generate", generate)
    router = Router(
        middleware_paths=[MIDDLEWARE], args=Namespace(hf_checkpoint=tiny_model_dir, trust_remote_code=False)
    )
    async with served(app) as worker, served(router.app()) as base, aiohttp.ClientSession() as session:
        router.pool.add(worker)
        await ask(session, f"{base}/generate", {"text": "what ?"})
        known = await ask(session, f"{base}/retrieve_from_text", {"text": "what ? sum"})
        assert known["tokens"] == [*inputs[0], word, end] and known["loss_mask"] == [0, 0, 1, 1]
        await ask(session, f"{base}/generate", {"text": f"what ? sum{tokenizer.eos_token} and"})
        assert inputs[1][: len(inputs[0]) + 2] == [*inputs[0], word, end] and inputs[1].count(end) == 1
