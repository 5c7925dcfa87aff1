"""Black-box agents over HTTP: what they were told is in the samples token by token."""

import json

import pytest

from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.openai_endpoint import open_session
from slime.rollout.openai_endpoint.session import parse_tool_calls
from slime.rollout.sglang_rollout import generate_rollout
from slime.utils.async_utils import run
from slime.utils.http_utils import HttpError, get, post, request
from slime.utils.misc import flatten
from slime.utils.processing_utils import load_tokenizer
from slime.utils.types import Sample
from tests.rollout.support import ScriptedEngine

pytestmark = pytest.mark.integration
EOS = 3


class ChatEngine(ScriptedEngine):
    """Ends most answers with the end of turn."""

    async def generate(self, request):
        reply = await super().generate(request)
        body = json.loads(reply.body)
        ids, meta = body["output_ids"], body["meta_info"]
        if meta["finish_reason"]["type"] == "stop":
            ids[-1] = EOS
            meta["output_token_logprobs"][-1][1] = EOS
        from aiohttp import web

        return web.json_response(body)


def talk(args, agent, sample=None, params=None):
    """Run `agent(session)`; the session's samples."""

    async def main():
        params_ = params or {"max_new_tokens": 6, "temperature": 1.0, "sampling_seed": 5}
        async with open_session(args, sample or Sample(index=4, group_index=2, label="7"), params_) as session:
            await agent(session)
        return session

    return run(main())


async def ask(session, messages, **fields):
    return await post(f"{session.base_url}/chat/completions", {"messages": messages, **fields}, max_retries=0)


@pytest.fixture
def args(cluster_of, rollout_args):
    engine = ChatEngine()
    args = rollout_args(sglang_router_port=cluster_of(engine).port)
    args.engine = engine
    return args


def user(text):
    return {"role": "user", "content": text}


def test_a_conversation_is_one_sample_of_exactly_its_tokens(args):
    replies, requests = [], []

    async def agent(session):
        messages = [user("what is the sum of 1 and 2 ?")]
        for _ in range(3):
            reply = await ask(session, messages)
            replies.append(reply)
            # As clients do: more fields than were sent, content as parts.
            message = {**reply["choices"][0]["message"], "refusal": None}
            messages += [message, {"role": "user", "content": [{"type": "text", "text": "and now ?"}]}]
        requests.extend(r["input_ids"] for r in args.engine.requests)

    session = talk(args, agent)
    sample = session.samples()
    tokenizer = load_tokenizer(args.hf_checkpoint)
    generated = [choice for reply in replies for choice in reply["choices"][0]["token_ids"]]
    response = sample.tokens[len(sample.tokens) - sample.response_length :]
    assert [t for t, m in zip(response, sample.loss_mask, strict=True) if m] == generated
    assert sample.loss_mask.count(1) == len(generated) == sum(r["usage"]["completion_tokens"] for r in replies)
    log_probs = [p for p, m in zip(sample.rollout_log_probs, sample.loss_mask, strict=True) if m]
    assert log_probs == [x["logprob"] for r in replies for x in r["choices"][0]["logprobs"]["content"]]
    # Each request is the sample so far: nothing generated was tokenised again.
    for ids, reply in zip(requests, replies, strict=True):
        assert sample.tokens[: len(ids)] == ids == reply["prompt_token_ids"]
    # The tokens are those of the template's rendering of the same conversation (answers that ended by themselves).
    assert tokenizer.decode(sample.tokens).count("<|im_start|> user and now ? <|im_end|>") == 2
    for span, (start, end) in zip(sample.weight_version_spans, runs(sample.loss_mask), strict=True):
        assert span == ("1", start, end)
    assert sample.metadata["round_number"] == 3 and sample.label == "7" and sample.group_index == 2


def runs(mask):
    """[start, end) of the stretches of ones."""
    out, start = [], None
    for i, m in enumerate([*mask, 0]):
        if m and start is None:
            start = i
        if not m and start is not None:
            out.append((start, i))
            start = None
    return out


def test_answers_that_ended_render_as_the_template_renders_them(args):
    """Where every answer ends its turn and decodes to itself, the sample is the rendering of the conversation."""
    conversation = []

    async def agent(session):
        conversation.append(user("what is the sum of 1 and 2 ?"))
        for _ in range(4):
            reply = await ask(session, conversation)
            conversation.append(reply["choices"][0]["message"])
            if reply["choices"][0]["finish_reason"] != "stop":
                break
            conversation.append(user("and now ?"))
        while conversation[-1]["role"] == "user":
            conversation.pop()

    sample = talk(args, agent, params={"max_new_tokens": 40, "sampling_seed": 1}).samples()
    tokenizer = load_tokenizer(args.hf_checkpoint)
    text = tokenizer.apply_chat_template(conversation, tokenize=False)
    rendered = tokenizer.encode(text, add_special_tokens=False)
    assert len(conversation) >= 4
    length = min(len(rendered), len(sample.tokens))
    assert rendered[:length] == sample.tokens[:length] and abs(len(rendered) - len(sample.tokens)) <= 1


def test_rewritten_history_and_a_second_agent_are_further_pieces(args):
    async def agent(session):
        first = await ask(session, [user("what is 1 ?")])
        await ask(session, [user("what is 1 ?"), first["choices"][0]["message"], user("and 2 ?")])
        await ask(session, [user("what is 1 ?"), {"role": "assistant", "content": "forgotten"}, user("and 2 ?")])
        await ask(session, [{"role": "system", "content": "judge"}, user("what is 2 ?")])

    pieces = talk(args, agent).samples()
    assert len(pieces) == 3 and [p.metadata["round_number"] for p in pieces] == [2, 1, 1]
    assert {(p.index, p.group_index, p.label) for p in pieces} == {(4, 2, "7")}
    for piece in pieces:
        assert len(piece.loss_mask) == len(piece.rollout_log_probs) == piece.response_length
        assert piece.response_length < len(piece.tokens)


def test_streaming_limits_models_and_errors(args):
    seen = {}

    async def agent(session):
        body = {"messages": [user("what is 1 ?")], "stream": True, "max_tokens": 2}
        seen["stream"] = await request("POST", f"{session.base_url}/chat/completions", json_body=body)
        seen["models"] = await get(f"{session.base_url}/models")
        for name, fields in {"n": {"n": 2}, "messages": {"messages": None}}.items():
            try:
                await ask(session, **{"messages": [user("x")], **fields})
            except HttpError as error:
                seen[name] = error
        seen["url"] = session.base_url

    session = talk(args, agent)
    lines = [line for line in seen["stream"].splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    chunk = json.loads(lines[0].removeprefix("data: "))
    assert chunk["object"] == "chat.completion.chunk" and chunk["choices"][0]["delta"]["role"] == "assistant"
    assert session.samples().response_length <= 2
    assert seen["models"]["data"][0]["id"] == "policy"
    assert seen["n"].status == 400 and "n must be 1" in seen["n"].body
    assert seen["messages"].status == 400 and "list of messages" in seen["messages"].body
    with pytest.raises(Exception, match=r"Connect|refused"):
        run(get(seen["url"] + "/models", max_retries=0))


def test_tool_calls():
    text = (
        'I look.\n<tool_call>\n{"name": "search", "arguments": {"q": "a}b"}}\n</tool_call><tool_call>{bad}</tool_call>'
    )
    (call,) = parse_tool_calls(text)
    assert call["function"] == {"name": "search", "arguments": '{"q": "a}b"}'}
    assert parse_tool_calls("nothing") == []


async def agent_generate(args, sample, sampling_params):
    """A generate function around an agent of two turns."""
    async with open_session(args, sample, sampling_params) as session:
        messages = [user(sample.prompt)]
        for _ in range(2):
            reply = await ask(session, messages)
            messages += [reply["choices"][0]["message"], user("go on")]
    return session.samples()


def test_in_a_rollout(args):
    args.custom_generate_function_path = "tests.rollout.test_openai_endpoint.agent_generate"
    args.custom_rm_path = "tests.rollout.hooks.reward_parity"
    output = generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    samples = list(flatten(output.samples))
    assert [s.index for s in samples] == list(range(8))
    assert all(s.metadata["round_number"] == 2 and s.reward is not None for s in samples)


def test_an_agent_that_is_interrupted_starts_again(cluster_of, rollout_args):
    engine = ChatEngine(hang_when=lambda payload: payload["sampling_params"]["sampling_seed"] >= 42 + 8)
    args = rollout_args(
        sglang_router_port=cluster_of(engine).port, over_sampling_batch_size=6, partial_rollout=True,
        custom_generate_function_path="tests.rollout.test_openai_endpoint.agent_generate_carefully",
        custom_rm_path="tests.rollout.hooks.reward_parity",
    )  # fmt: skip
    source = RolloutDataSourceWithBuffer(args)
    generate_rollout(args, 0, source)
    waiting = [s for s in flatten(source.buffer) if s.aborted]
    assert waiting and all(s.response_length == 0 and s.index >= 8 for s in waiting)


async def agent_generate_carefully(args, sample, sampling_params):
    """As agents are that give up when their server does."""
    async with open_session(args, sample, sampling_params) as session:
        try:
            await ask(session, [user(sample.prompt)])
        except HttpError as error:
            assert error.status == 503
    return session.samples()
