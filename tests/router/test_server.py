"""The router over real HTTP, in this process and as its own process."""

import asyncio
import contextlib
import re
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from slime.router.middleware_hub import payload_of, replace
from slime.router.server import Router
from slime.utils.async_utils import wait_for_exit
from slime.utils.misc import HookError
from tests.rollout.support import ScriptedEngine, served

pytestmark = pytest.mark.integration
PAYLOAD = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 3, "sampling_seed": 1}}


@contextlib.asynccontextmanager
async def routed(*apps, **options):
    """A router in front of apps, and a client session."""
    async with contextlib.AsyncExitStack() as stack:
        router = Router(**{"queue_timeout": 0.3, **options})
        base = await stack.enter_async_context(served(router.app()))
        for app in apps:
            router.pool.add(await stack.enter_async_context(served(app)))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        yield router, base, session


async def json_of(request):
    async with request as reply:
        return reply.status, await reply.json()


async def test_both_registration_apis():
    async with routed() as (_, base, session):
        status, reply = await json_of(session.post(f"{base}/add_worker?url=http://h:1"))
        assert status == 200 and reply["status"] == "success" and reply["worker_urls"] == {"http://h:1": 0}
        await json_of(session.post(f"{base}/add_worker", json={"worker_url": "http://h:2"}))
        status, created = await json_of(session.post(f"{base}/workers", json={"url": "h:3"}))
        assert status == 202 and created["url"] == "http://h:3"
        assert (await json_of(session.get(f"{base}/list_workers")))[1] == {
            "urls": ["http://h:1", "http://h:2", "http://h:3"]
        }
        _, listed = await json_of(session.get(f"{base}/workers"))
        assert [w["url"] for w in listed["workers"]] == ["http://h:1", "http://h:2", "http://h:3"]
        assert (await json_of(session.get(f"{base}/workers/{created['worker_id']}")))[1]["url"] == "http://h:3"
        assert (await json_of(session.delete(f"{base}/workers/{created['worker_id']}")))[0] == 202
        await json_of(session.post(f"{base}/remove_worker?url=http://h:1"))
        assert (await json_of(session.get(f"{base}/list_workers")))[1] == {"urls": ["http://h:2"]}
        assert (await json_of(session.delete(f"{base}/workers/none")))[0] == 404
        assert (await json_of(session.post(f"{base}/add_worker")))[0] == 400


async def test_no_worker_is_503():
    async with routed() as (_, base, session):
        status, reply = await json_of(session.post(f"{base}/generate", json=PAYLOAD))
        assert status == 503 and reply["error"]["code"] == "no_available_workers"


async def test_requests_spread_by_load():
    engines = [ScriptedEngine(token_seconds=0.02) for _ in range(3)]
    async with routed(*(e.app() for e in engines)) as (router, base, session):
        replies = await asyncio.gather(*(json_of(session.post(f"{base}/generate", json=PAYLOAD)) for _ in range(12)))
        assert all(status == 200 and "meta_info" in body for status, body in replies)
        assert [len(e.requests) for e in engines] == [4, 4, 4]
        assert all(worker.in_flight == 0 for worker in router.pool.workers)


async def test_status_query_headers_and_body_pass_through():
    async def echo(request):
        body = await request.text()
        return web.json_response(
            {"path": request.path_qs, "method": request.method, "body": body, "key": request.headers.get("X-Key")},
            status=418,
            headers={"X-Back": "yes"},
        )

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", echo)
    async with routed(app) as (_, base, session):
        async with session.put(f"{base}/some/path?a=1&b=%20x", data=b"hello", headers={"X-Key": "k"}) as reply:
            assert reply.status == 418 and reply.headers["X-Back"] == "yes"
            assert await reply.json() == {
                "path": "/some/path?a=1&b=%20x",
                "method": "PUT",
                "body": "hello",
                "key": "k",
            }


async def test_cookies_stay_with_their_client():
    async def cookie(request):
        seen = request.headers.get("Cookie")
        return web.json_response({"seen": seen}, headers={"Set-Cookie": "a=1"})

    app = web.Application()
    app.router.add_get("/cookie", cookie)
    async with routed(app) as (router, base, session):
        (worker,) = router.pool.workers
        router.pool.remove(worker.url)
        router.pool.add(worker.url.replace("127.0.0.1", "localhost"))
        for _ in range(2):
            async with session.get(f"{base}/cookie", headers={"Cookie": ""}) as reply:
                assert not (await reply.json())["seen"] and reply.headers["Set-Cookie"] == "a=1"
        assert (await json_of(session.get(f"{base}/cookie", headers={"Cookie": "b=2"})))[1] == {"seen": "b=2"}


async def test_sse_arrives_as_it_is_sent():
    gate = asyncio.Event()

    async def stream(request):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"text": "a"}\n\n')
        await gate.wait()
        await response.write(b"data: [DONE]\n\n")
        return response

    app = web.Application()
    app.router.add_post("/generate", stream)
    async with routed(app) as (_, base, session):
        async with session.post(f"{base}/generate", json={**PAYLOAD, "stream": True}) as reply:
            assert reply.content_type == "text/event-stream"
            first = await asyncio.wait_for(reply.content.readuntil(b"\n\n"), 5)
            assert first == b'data: {"text": "a"}\n\n'
            gate.set()
            assert await asyncio.wait_for(reply.content.read(), 5) == b"data: [DONE]\n\n"


async def test_a_client_that_hangs_up_ends_its_request_at_the_worker():
    engine = ScriptedEngine(hang_when=lambda payload: True)
    async with routed(engine.app()) as (router, base, session):
        request = asyncio.ensure_future(session.post(f"{base}/generate", json=PAYLOAD))
        await until(lambda: engine.running)
        request.cancel()
        await until(lambda: engine.disconnects == 1)
        await until(lambda: router.pool.workers[0].in_flight == 0)


async def until(condition):
    async def poll():
        while not condition():
            await asyncio.sleep(0.01)

    await asyncio.wait_for(poll(), 10)


async def test_a_dead_workers_request_goes_to_another():
    calls = []

    async def die(request):
        calls.append(1)
        await request.read()
        request.transport.abort()
        await asyncio.sleep(60)

    dying = web.Application()
    dying.router.add_post("/generate", die)
    engine = ScriptedEngine()
    async with routed(dying, engine.app()) as (router, base, session):
        router.pool.add("http://127.0.0.1:9")  # nobody listens there
        for _ in range(4):
            status, reply = await json_of(session.post(f"{base}/generate", json=PAYLOAD))
            assert status == 200 and reply["meta_info"]["completion_tokens"] > 0
        assert len(engine.requests) == 4 and 1 <= len(calls) <= 2
        assert router.pool.workers[1].healthy and not router.pool.workers[2].healthy


async def test_all_workers_dead_is_502_with_the_reason():
    async with routed() as (router, base, session):
        router.pool.add("http://127.0.0.1:9")
        status, reply = await json_of(session.post(f"{base}/generate", json=PAYLOAD))
        assert status == 502 and "127.0.0.1" in reply["error"]["message"] and "9" in reply["error"]["message"]


async def test_a_session_stays_at_its_worker():
    engines = [ScriptedEngine() for _ in range(3)]
    async with routed(*(e.app() for e in engines)) as (_, base, session):
        for key in range(30):
            payload = {**PAYLOAD, "session": key}
            for _ in range(3):
                request = session.post(f"{base}/generate", json=payload, headers={"X-SMG-Routing-Key": f"s{key}"})
                assert (await json_of(request))[0] == 200
        seen = [{r["session"] for r in e.requests} for e in engines]
        assert sum(len(keys) for keys in seen) == 30 and all(len(keys) >= 3 for keys in seen)


class Switch:
    """A worker that can be made to refuse, hang or vanish, on one address."""

    def __init__(self):
        self.engine = ScriptedEngine()
        self.state = "up"
        self.asked = 0

    def app(self):
        @web.middleware
        async def middleware(request, handler):
            self.asked += request.path == "/generate"
            if self.state == "starting":
                return web.Response(status=503, text="loading")
            if self.state == "stopped":
                await asyncio.sleep(600)
            return await handler(request)

        app = self.engine.app()
        app.middlewares.append(middleware)
        return app


PROBES = {"health_interval": 0.05, "health_timeout": 0.2, "queue_timeout": 20}


async def test_requests_wait_for_a_worker_instead_of_failing():
    switch = Switch()
    async with routed(switch.app(), **PROBES) as (router, base, session):
        switch.state = "starting"
        requests = [asyncio.ensure_future(json_of(session.post(f"{base}/generate", json=PAYLOAD))) for _ in range(5)]
        await until(lambda: router.pool.workers[0].quarantined)
        asked = switch.asked
        done, _ = await asyncio.wait(requests, timeout=0.3)
        assert not done and switch.asked == asked  # a worker in quarantine gets none
        switch.state = "up"
        assert [status for status, _ in await asyncio.gather(*requests)] == [200] * 5
        assert router.pool.workers[0].healthy


async def test_requests_wait_for_the_first_worker():
    engine = ScriptedEngine()
    async with routed(queue_timeout=20) as (router, base, session), served(engine.app()) as worker:
        request = asyncio.ensure_future(json_of(session.post(f"{base}/generate", json=PAYLOAD)))
        await until(lambda: router.pool._waiters)
        router.pool.add(worker)
        assert (await asyncio.wait_for(request, 5))[0] == 200


async def test_a_stopped_worker_loses_its_requests_to_another():
    stopped, engine = Switch(), ScriptedEngine()
    async with routed(stopped.app(), **PROBES) as (router, base, session):
        stopped.state = "stopped"
        request = asyncio.ensure_future(json_of(session.post(f"{base}/generate", json=PAYLOAD)))
        await until(lambda: stopped.asked)
        async with served(engine.app()) as worker:
            router.pool.add(worker)
            assert (await asyncio.wait_for(request, 10))[0] == 200
            assert len(engine.requests) == 1 and router.pool.workers[0].in_flight == 0
            stopped.state = "up"
            await until(lambda: router.pool.workers[0].healthy)


async def test_a_request_that_kills_workers_is_given_up():
    calls = []

    async def die(request):
        calls.append(1)
        await request.read()
        request.transport.abort()
        await asyncio.sleep(60)

    app = web.Application()
    app.router.add_post("/generate", die)
    async with routed(app, **PROBES) as (_, base, session):
        status, reply = await json_of(session.post(f"{base}/generate", json=PAYLOAD))
        assert status == 502 and reply["error"]["code"] == "workers_failed" and len(calls) <= 10


class Shout:
    """Middleware: upper-cases what goes in, adds a header to what comes out."""

    def __init__(self, app, *, router):
        self.router = router

    async def dispatch(self, request, call_next):
        payload = await payload_of(request)
        if payload is not None:
            replace(request, {**payload, "text": payload["text"].upper()})
        response = await call_next(request)
        response.headers["X-Workers"] = str(len(self.router.pool))
        return response


async def test_middleware_by_import_path():
    async def echo(request):
        return web.json_response(await request.json())

    app = web.Application()
    app.router.add_post("/generate", echo)
    async with routed(app, middleware_paths=["tests.router.test_server.Shout"]) as (_, base, session):
        async with session.post(f"{base}/generate", json={"text": "hi"}) as reply:
            assert reply.headers["X-Workers"] == "1" and await reply.json() == {"text": "HI"}
        assert (await json_of(session.post(f"{base}/retrieve_from_text", json={"text": "x"})))[0] == 404
    for path, message in (("nowhere.Middleware", "nowhere"), ("builtins.dict", "dispatch"), ("builtins.len", "len")):
        with pytest.raises(HookError, match=message):
            Router(middleware_paths=[path]).app()


class Raises(Shout):
    async def dispatch(self, request, call_next):
        raise KeyError("no such thing")


class AnswersNothing(Shout):
    async def dispatch(self, request, call_next):
        return None


class CannotBeBuilt:
    def __init__(self, app, *, router):
        raise OSError("no dictionary")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Raises", r"failed: KeyError: 'no such thing' \(.*test_server.py:\d+\)"),
        ("AnswersNothing", "failed: TypeError: it returned None, not a response"),
    ],
)
async def test_a_broken_middleware_is_named_in_the_answer(name, message):
    path = f"tests.router.test_server.{name}"
    engine = ScriptedEngine()
    async with routed(engine.app(), middleware_paths=[path]) as (_, base, session):
        for request in (session.post(f"{base}/generate", json=PAYLOAD), session.post(f"{base}/workers", json={})):
            status, reply = await json_of(request)
            assert status == 500 and reply["error"]["code"] == "middleware_failed"
            assert re.match(f"--slime-router-middleware-paths {path} {message}", reply["error"]["message"])
        assert (await json_of(session.get(f"{base}/health")))[0] == 200 and not engine.requests


async def test_a_middleware_that_cannot_be_built_is_named():
    path = "tests.router.test_server.CannotBeBuilt"
    with pytest.raises(
        HookError, match=rf"--slime-router-middleware-paths {path}: OSError: no dictionary \(.*py:\d+\)"
    ):
        Router(middleware_paths=[path]).app()


async def test_slow_worker_is_504():
    engine = ScriptedEngine(hang_when=lambda payload: True)
    async with routed(engine.app(), request_timeout=0.3) as (_, base, session):
        status, reply = await json_of(session.post(f"{base}/generate", json=PAYLOAD))
        assert status == 504 and "did not answer within 0.3 s" in reply["error"]["message"]


@contextlib.asynccontextmanager
async def router_process(tmp_path: Path, *options: str):
    port_file = tmp_path / "port"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "slime.router.server", "--port", "0", "--port-file", str(port_file), *options
    )
    try:
        await until(port_file.exists)
        yield process, f"http://127.0.0.1:{port_file.read_text()}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def test_process_ends_on_sigterm_even_with_requests_in_flight(tmp_path):
    engine = ScriptedEngine(hang_when=lambda payload: True)
    async with served(engine.app()) as worker, router_process(tmp_path, "--worker-urls", worker) as (process, base):
        async with aiohttp.ClientSession() as session:
            request = asyncio.ensure_future(session.post(f"{base}/generate", json=PAYLOAD))
            await until(lambda: engine.running)
            process.terminate()
            await asyncio.wait_for(process.wait(), 10)
            with pytest.raises(aiohttp.ClientError):
                await request


async def test_process_ends_with_its_parent(tmp_path):
    parent = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    async with router_process(tmp_path, "--parent-pid", str(parent.pid)) as (process, base):
        async with aiohttp.ClientSession() as session:
            status, body = await json_of(session.get(f"{base}/health"))
            assert status == 200 and body["workers"] == 0
        parent.kill()
        await asyncio.wait_for(process.wait(), 10)
    parent.wait()


async def test_wait_for_exit_of_a_missing_process():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    await asyncio.wait_for(wait_for_exit(process.pid), 5)
