"""Requests that go through actors: replies, refusals and the loss of a node."""

import asyncio
from argparse import Namespace

import pytest
import ray

from slime.ray.http_posters import start_posters
from slime.testing.scripted_engine import ScriptedEngine, served_in_thread
from slime.utils import http_utils
from slime.utils.async_utils import run

pytestmark = pytest.mark.integration
PAYLOAD = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 3, "sampling_seed": 1}}


@pytest.fixture
def engine():
    engine = ScriptedEngine(hang_when=lambda payload: payload["input_ids"] == [8])
    with served_in_thread(engine.app()) as url:
        engine.url = url
        yield engine


@pytest.fixture
def posters(local_ray, tmp_path):
    posters = start_posters(Namespace(run_dir=str(tmp_path), sglang_router_request_timeout_secs=60))
    http_utils.send_through(posters)
    yield posters
    http_utils.send_through(None)
    for actor in posters.actors:
        ray.kill(actor)


def test_requests_go_through_the_actors(posters, engine):
    async def ask():
        url = f"{engine.url}/generate"
        replies = await asyncio.gather(*(http_utils.post(url, PAYLOAD) for _ in range(20)))
        assert len(replies) == 20 and all(reply["meta_info"]["output_token_logprobs"] for reply in replies)
        with pytest.raises(http_utils.HttpError, match="/nowhere answered 404") as caught:
            await http_utils.post(f"{engine.url}/nowhere", {})
        assert caught.value.status == 404 and isinstance(caught.value.body, str)
        with pytest.raises(http_utils.aiohttp.ClientConnectionError, match="ClientConnectorError"):
            await http_utils.post("http://127.0.0.1:1/generate", PAYLOAD, max_retries=0)
        # A caller that gives up ends its request at the engine.
        waiting = asyncio.ensure_future(http_utils.post(url, {**PAYLOAD, "input_ids": [8]}))
        while not engine.running:
            await asyncio.sleep(0.02)
        waiting.cancel()
        while not engine.disconnects:
            await asyncio.sleep(0.02)

    assert len(posters.actors) == 1
    run(asyncio.wait_for(ask(), 60))


def test_a_lost_node_is_left_out(posters, engine):
    async def ask():
        url = f"{engine.url}/generate"
        await http_utils.post(url, PAYLOAD)
        waiting = asyncio.ensure_future(http_utils.post(url, {**PAYLOAD, "input_ids": [8]}))
        while not engine.running:
            await asyncio.sleep(0.02)
        ray.kill(posters.actors[0])
        while posters.actors:
            await asyncio.sleep(0.02)
        # What it was sending is sent again, from here.
        while len([r for r in engine.requests if r["input_ids"] == [8]]) < 2:
            await asyncio.sleep(0.02)
        await http_utils.post(f"{engine.url}/abort_request", {"abort_all": True})
        assert (await waiting)["meta_info"]["finish_reason"]["type"] == "abort"

    run(asyncio.wait_for(ask(), 60))
