"""A router and scripted engines on a thread of their own, as separate servers would be."""

import asyncio
import threading

import pytest

from slime.router.server import Router
from tests.rollout.support import ScriptedEngine, make_args, served, write_prompts


class Cluster:
    """Real router and engines over HTTP, running in a background event loop."""

    def __init__(self, engines: list[ScriptedEngine]) -> None:
        self.engines = engines
        self.port = 0
        self.loop = asyncio.new_event_loop()
        self._stop: asyncio.Event | None = None
        self._ready = threading.Event()
        self.thread = threading.Thread(target=self.loop.run_until_complete, args=(self._main(),), daemon=True)
        self.thread.start()
        assert self._ready.wait(20)

    async def _main(self) -> None:
        self._stop = asyncio.Event()
        router = Router()
        async with served(router.app()) as url:
            self.port = int(url.rsplit(":", 1)[1])
            await self._serve(router, self.engines)

    async def _serve(self, router: Router, rest: list[ScriptedEngine]) -> None:
        if not rest:
            self._ready.set()
            await self._stop.wait()
            return
        async with served(rest[0].app()) as url:
            rest[0].url = url
            router.pool.add(url)
            await self._serve(router, rest[1:])

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self._stop.set)
        self.thread.join(20)

    @property
    def requests(self) -> list[dict]:
        return [request for engine in self.engines for request in engine.requests]


@pytest.fixture
def cluster_of():
    """Start clusters of scripted engines; they end with the test."""
    clusters = []

    def start(*engines: ScriptedEngine) -> Cluster:
        clusters.append(Cluster(list(engines) or [ScriptedEngine(), ScriptedEngine()]))
        return clusters[-1]

    yield start
    for cluster in clusters:
        cluster.close()


@pytest.fixture
def rollout_args(tmp_path, tiny_model_dir):
    """Arguments with a prompt file and the tiny tokenizer; keyword arguments override."""

    def build(**overrides):
        rows = overrides.pop("rows", 12)
        data = overrides.pop("prompt_data", None) or write_prompts(tmp_path / "prompts.jsonl", rows)
        return make_args(hf_checkpoint=tiny_model_dir, prompt_data=data, **overrides)

    return build
