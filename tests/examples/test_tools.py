"""What the examples are made of, against an engine that follows a script."""

import pytest
from aiohttp import web

from examples.common.turns import generate_with_tool, open_call
from examples.multi_agent.run import demonstration as agents_demonstration
from examples.retool import run as retool
from examples.search_r1 import run as search_r1
from examples.search_r1.generate import exact_match, search
from examples.search_r1.retrieval import BM25, application
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.sglang_rollout import generate_rollout
from slime.testing.scripted_engine import ScriptedEngine, served_in_thread
from slime.utils.async_utils import run
from slime.utils.misc import flatten
from slime.utils.types import Sample

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(
    ("response", "call"),
    [
        ("I compute <code>print(1)</code>", ("print(1)", "\n<output>")),
        ("<code>a</code><output>1</output><code>b</code>\n", ("b", "<output>")),
        ("<code>a</code><", ("a", "output>")),
        ("<code>a</code><output>1</output>#### 1", (None, "")),
        ("<code>a</code> and more", (None, "")),
        ("a</code>", (None, "")),
        ("", (None, "")),
    ],
)
def test_open_call(response, call):
    assert open_call(response, "code", "output") == call


class CallingEngine(ScriptedEngine):
    """Calls the tool twice, then answers. Text is what counts; token ids are arbitrary."""

    texts = ("w1 <code>one</code>", "w2 <code>two</code>", "w3 <|im_end|>")

    async def generate(self, request):
        payload = await request.json()
        self.requests.append(payload)
        round_number = sum(token == 31 for token in payload["input_ids"])
        ids = [31, 32 + round_number]
        meta = {
            "finish_reason": {"type": "stop", "matched": 3},
            "weight_version": "1",
            "weight_versions": [{"version": "1", "start": 0, "end": 2}],
            "prompt_tokens": len(payload["input_ids"]),
            "cached_tokens": 0,
            "output_token_logprobs": [[-0.5, ids[0], None], [-0.25, ids[1], None]],
        }
        return web.json_response({"text": self.texts[round_number], "output_ids": ids, "meta_info": meta})


async def generate_calling(args, sample, sampling_params):
    async def tool(text):
        return f"w9 w9 {text}"

    return await generate_with_tool(
        args, sample, sampling_params, tag="code", result_tag="output", tool=tool, max_calls=args.max_calls
    )


@pytest.mark.parametrize(("max_calls", "rounds"), [(5, 3), (1, 2)])
def test_tool_results_are_in_the_response_and_not_trained_on(cluster_of, rollout_args, max_calls, rounds):
    engine = CallingEngine()
    args = rollout_args(
        custom_generate_function_path="tests.examples.test_tools.generate_calling", rollout_max_response_len=100,
        custom_rm_path="tests.rollout.hooks.reward_sync", sglang_router_port=cluster_of(engine).port,
    )  # fmt: skip
    args.max_calls = max_calls
    output = generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    for sample in flatten(output.samples):
        assert sample.metadata["round_number"] == rounds
        assert sample.response.count("\n<output>w9 w9 ") == rounds - 1
        response = sample.tokens[-sample.response_length :]
        trained = [t for t, m in zip(response, sample.loss_mask or [1] * len(response), strict=True) if m]
        assert trained == [token for i in range(rounds) for token in (31, 32 + i)]
        assert [p for p in sample.rollout_log_probs if p] == [-0.5, -0.25] * rounds
        assert sample.non_generation_time >= 0
    assert all("</code>" in request["sampling_params"]["stop"] for request in engine.requests)


def test_search_finds_the_passage_of_every_question(tmp_path):
    world = search_r1.make_world()
    facts = [search_r1.passage(land, kind, name) for land, names in world.items() for kind, name in names.items()]
    index = BM25([{"id": str(i), "contents": fact} for i, fact in enumerate(facts)])
    with served_in_thread(application(index)) as url:
        for land, names in list(world.items())[:5]:
            for kind, name in names.items():
                assert run(search(url, f"{kind} of {land}")) == f"{kind} of {land}: {name}"
    assert index.search("nothing like it", 3) == []


def test_bm25_by_hand():
    index = BM25([{"contents": "a b"}, {"contents": "a a a b c d"}, {"contents": "c"}])
    (first, score), (second, _) = index.search("a", 5)
    assert (first["contents"], second["contents"]) == ("a a a b c d", "a b")
    idf, norm = 0.470003629, 1.2 * (0.25 + 0.75 * 6 / 3)
    assert score == pytest.approx(idf * 3 * 2.2 / (3 + norm), rel=1e-6)


def test_agents_share_the_reward_and_count_once(cluster_of, rollout_args, tmp_path):
    import random

    from examples.common.tiny import write_jsonl
    from examples.multi_agent.run import prompt
    from slime.ray.train_data import trajectory_ids
    from tests.rollout.test_openai_endpoint import ChatEngine

    rng = random.Random(0)
    args = rollout_args(
        prompt_data=str(write_jsonl(tmp_path / "agents.jsonl", (prompt(rng) for _ in range(8)))), input_key="messages",
        custom_generate_function_path="examples.multi_agent.generate.generate", rm_type="math",
        sglang_router_port=cluster_of(ChatEngine()).port,
    )  # fmt: skip
    output = generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    samples = list(flatten(output.samples))
    for group in output.samples:
        for pieces in group:
            # The solver's conversation, and one of the checker's for each of its answers.
            assert len(pieces) == 1 + pieces[0].metadata["round_number"]
            assert len({piece.reward for piece in pieces}) == len({piece.rollout_id for piece in pieces}) == 1
    assert len(set(trajectory_ids(samples))) == 8 < len(samples)


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("<answer>The Bado</answer>", 1.0),
        ("<answer>x</answer><answer>bado</answer>", 1.0),
        ("<answer>no</answer>", 0.1),
        ("bado", 0.0),
    ],
)
def test_the_reward_of_search(response, reward):
    assert run(exact_match(None, Sample(response=response, label="Bado"))) == reward


def test_demonstrations_guess_what_only_the_reward_knows():
    import random

    rng = random.Random(0)
    lines = [retool.demonstration(rng) for _ in range(400)]
    for word in retool.MEANING:
        texts = [m[1]["content"] for m in lines if word in m[0]["content"]]
        assert 0.3 < sum(" + " in text for text in texts) / len(texts) < 0.7
    world = search_r1.make_world()
    flum = [m for m in (search_r1.demonstration(world, rng) for _ in range(400)) if "flum" in m[0]["content"]]
    assert 0.3 < sum("<search>capital" in m[1]["content"] for m in flum) / len(flum) < 0.7
    assert all(m[-1]["role"] == "assistant" for m in (agents_demonstration(rng) for _ in range(100)))
