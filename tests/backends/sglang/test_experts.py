"""A model with experts on two stock servers: the routing that comes back, and turns that find their server again."""

import asyncio
import os

import pytest
import torch

from slime.arguments.parser import resolve
from slime.backends.sglang_utils.compat import installed_version, parse_version
from slime.ray.router_process import RouterProcess
from slime.rollout.generation import generate
from slime.utils.async_utils import run
from slime.utils.served_models import one_group
from slime.utils.types import Sample
from tests.conformance.servers import SGLangServer
from tests.rollout.support import make_args

VERSION = parse_version(installed_version() or "0")
pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(900),
    pytest.mark.skipif(VERSION == (0,), reason="SGLang is not installed"),
    pytest.mark.skipif(VERSION == (0, 5, 17), reason="this release returns routing from memory pinned by CUDA only"),
]
ROUTER_ENV = os.environ.get("SLIME_TEST_SGLANG_ROUTER_ENV")
ROUTERS = [
    pytest.param(("--use-slime-router",), id="slime"),
    pytest.param(
        ("--sglang-router-env", ROUTER_ENV, "--router-policy", "manual", "--router-log-level", "warn"),
        id="sglang-router",
        marks=pytest.mark.skipif(not ROUTER_ENV, reason="SLIME_TEST_SGLANG_ROUTER_ENV is not set"),
    ),
]
GREEDY = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}


class RoutingServer(SGLangServer):
    """Returns the experts of each token."""

    def command(self, model_path):
        command, env = super().command(model_path)
        return [*command, "--enable-return-routed-experts"], env


@pytest.fixture(scope="module")
def servers(moe_dir, tmp_path_factory):
    servers = [RoutingServer(moe_dir, tmp_path_factory.mktemp("server")) for _ in range(2)]
    try:
        yield [server.wait() for server in servers]
    finally:
        for server in servers:
            server.stop()


def arguments(moe_dir, port: int):
    return make_args(hf_checkpoint=moe_dir, sglang_router_port=port, use_rollout_routing_replay=True)


@pytest.mark.parametrize("cached", [False, True])
def test_experts_are_those_that_the_model_s_routers_choose(servers, moe_dir, cached):
    sample = run(generate(arguments(moe_dir, port_of(servers[0])), Sample(tokens=list(range(10, 40))), dict(GREEDY)))
    assert (sample.prefix_cache_info["cached_tokens"] > 0) == cached  # the routing of cached tokens comes too
    assert agreement(sample, moe_dir) == 1


def port_of(server: SGLangServer) -> int:
    return int(server.url.rpartition(":")[2])


def agreement(sample: Sample, moe_dir: str) -> float:
    """Share of (token, layer) whose experts are those that transformers chooses."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(moe_dir, attn_implementation="eager").eval()
    with torch.inference_mode():
        logits = model(torch.tensor([sample.tokens]), output_router_logits=True).router_logits
    expected_TLK = torch.stack(logits, 1)[:-1].topk(2).indices.sort(-1).values
    experts_TLK = torch.from_numpy(sample.rollout_routed_experts.copy()).long().sort(-1).values
    assert experts_TLK.shape == expected_TLK.shape
    return (experts_TLK == expected_TLK).all(-1).float().mean().item()


@pytest.mark.parametrize("flags", ROUTERS)
def test_turns_of_a_session_find_the_server_that_knows_them(servers, moe_dir, tmp_path, flags):
    given = resolve([*flags, "--device", "cpu"])
    vars(given).update(served_models=one_group(None, 2, 1), sglang_model_routers={})
    router = RouterProcess(given, tmp_path / "router.log", given.served_models[0])
    sessions = [Sample(tokens=list(range(10 + i, 40 + i)), session_id=f"session-{i}") for i in range(6)]
    try:
        router.start()
        for server in servers:
            server.ok("/flush_cache", {})
            router.add(server.url)
        args = arguments(moe_dir, given.sglang_router_port)
        for turn in range(3):
            known = [len(sample.tokens) if turn else 0 for sample in sessions]
            cached = [turn and sample.prefix_cache_info["cached_tokens"] for sample in sessions]
            run(next_turns(args, sessions))
            found = [s.prefix_cache_info["cached_tokens"] - c for s, c in zip(sessions, cached, strict=True)]
            assert all(f >= k - 2 for f, k in zip(found, known, strict=True)), (turn, found, known)
    finally:
        router.close()


async def next_turns(args, sessions: list[Sample]) -> None:
    """Twelve more tokens for each, at once."""
    for sample in sessions:
        sample.status = Sample.Status.PENDING
    budgets = [{**GREEDY, "max_new_tokens": sample.response_length + 12} for sample in sessions]
    await asyncio.gather(*(generate(args, s, budget) for s, budget in zip(sessions, budgets, strict=True)))
