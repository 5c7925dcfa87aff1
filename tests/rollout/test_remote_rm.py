"""A reward service that fails in the ways that services do, over real connections."""

import asyncio
import contextlib
import time
from collections import Counter
from itertools import pairwise

import pytest
from aiohttp import web

from slime.rollout.errors import RewardError
from slime.rollout.rm_hub import async_rm, batched_async_rm
from slime.utils.types import Sample
from tests.rollout.support import make_args, served

pytestmark = pytest.mark.integration


class Judge:
    """Meets each response with the faults in `faults[response]`, one per try, then scores it 0.5."""

    def __init__(self, **faults: list) -> None:
        self.faults = faults
        self.seen: list[dict] = []
        self.tries: Counter[str] = Counter()
        self.open = self.most_open = 0

    async def judge(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.seen.append(body)
        fault = self._next_fault(body["response"])
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            if isinstance(fault, int):
                return web.Response(status=fault, text=f"status {fault}")
            if isinstance(fault, float):
                await asyncio.sleep(fault)
            if fault == "reset":
                request.transport.abort()
            if fault == "half":
                reply = web.StreamResponse(headers={"Content-Length": "100"})
                await reply.prepare(request)
                await reply.write(b"{")
                request.transport.close()
                return reply
            if isinstance(fault, dict):
                return web.json_response(fault["reply"])
            return web.json_response(0.5)
        finally:
            self.open -= 1

    def _next_fault(self, response: str):
        done = self.tries[response]
        self.tries[response] += 1
        faults = self.faults.get(response, [])
        return faults[done] if done < len(faults) else None

    @contextlib.asynccontextmanager
    async def running(self):
        app = web.Application()
        app.router.add_post("/judge", self.judge)
        async with served(app) as url:
            yield f"{url}/judge"


def sample_of(response, **fields):
    return Sample(index=3, group_index=1, prompt="p", response=response, label="l", **fields)


def remote_args(url, **overrides):
    return make_args(rm_type="remote_rm", rm_url=url, **overrides)


async def test_faults_are_waited_out():
    faults = {
        "errors": [500, 502, 503, 500, 500],
        "busy": [429, 408],
        "reset": ["reset", "reset"],
        "half": ["half"],
        "slow": [0.3],
        "mixed": ["reset", 503, "half", 429],
    }
    judge = Judge(**faults)
    async with judge.running() as url:
        samples = [sample_of(name) for name in faults]
        assert await batched_async_rm(remote_args(url), samples) == [0.5] * len(faults)
    tries = {name: len(steps) + 1 if name != "slow" else 1 for name, steps in faults.items()}
    assert judge.tries == tries
    assert judge.seen[0] == {"prompt": "p", "response": "errors", "label": "l"}


async def test_tries_are_spaced_further_and_further():
    judge = Judge(r=[503] * 4)
    times = []
    original = judge._next_fault
    judge._next_fault = lambda response: (times.append(time.monotonic()), original(response))[1]
    async with judge.running() as url:
        assert await async_rm(remote_args(url), sample_of("r")) == 0.5
    # A pause is never shorter than planned; how much longer it gets is up to the machine.
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert all(gap >= pause for gap, pause in zip(gaps, (0.1, 0.2, 0.4, 0.8), strict=True))


@pytest.mark.parametrize(
    "faults, limit, message",
    [
        ([60.0], 0.4, r"/judge did not answer within --rm-timeout-secs 0.4 \(sample 3 of group 1\)"),
        ([503] * 50, 0.5, r"did not answer within .* 0.5 \(last failure: .*answered 503: status 503\) \(sample 3"),
        ([404], 20, r"failed: HttpError: .* answered 404"),
        ([{"reply": "good"}], 20, "returned 'good', not a number or a dict"),
        ([{"reply": None}], 20, "returned None, not a number"),
    ],
)
async def test_what_cannot_be_waited_out_names_sample_and_cause(faults, limit, message):
    async with Judge(r=faults).running() as url:
        with pytest.raises(RewardError, match=message):
            await async_rm(remote_args(url, rm_timeout_secs=limit), sample_of("r"))


async def test_no_server_at_all():
    async with Judge().running() as url:
        pass
    with pytest.raises(RewardError, match=r"last failure: .*Cannot connect"):
        await async_rm(remote_args(url, rm_timeout_secs=0.5), sample_of("r"))


async def test_groups_dicts_and_the_boxed_prefix():
    judge = Judge(**{name: [{"reply": {"score": i, "kind": name}}] for i, name in enumerate("ab")}, c=[0.2] * 20)
    async with judge.running() as url:
        args = remote_args(url, group_rm=True, reward_key="score")
        samples = [sample_of("a"), sample_of("b"), *(sample_of("c") for _ in range(20))]
        for sample, reward in zip(samples, await batched_async_rm(args, samples), strict=True):
            sample.reward = reward
        assert [sample.get_reward_value(args) for sample in samples[:2]] == [0, 1]
        assert judge.most_open > 10  # asked at once
        boxed = sample_of("x \\boxed{b} y", metadata={"rm_type": "boxed_remote_rm"})
        assert await async_rm(make_args(rm_url=url), boxed) == 0.5
        assert judge.seen[-1]["response"] == "b"
