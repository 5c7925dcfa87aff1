"""ASGI middleware around the router, over real HTTP."""

import asyncio
import json

import pytest
from aiohttp import web

from tests.router.test_server import json_of, routed

pytestmark = pytest.mark.integration
HERE = "tests.router.test_asgi"
STOP = [f"data: {n}\n\n".encode() for n in range(3)]


class Tag:
    """Plain ASGI: adds a word to the request's list and a header to the answer; the client's headers reach it."""

    name = "tag"

    def __init__(self, app, *, router):
        self.app, self.router = app, router

    async def __call__(self, scope, receive, send):
        message = await receive()
        payload = json.loads(message["body"])
        payload["words"].append(self.name + dict(scope["headers"])[b"x-key"].decode())

        async def changed():
            return {"type": "http.request", "body": json.dumps(payload).encode()}

        async def tagged(message):
            if message["type"] == "http.response.start":
                message["headers"].append((b"x-workers", str(len(self.router.pool)).encode()))
            await send(message)

        headers = [*scope["headers"], (b"x-routed", self.name.encode())]
        await self.app({**scope, "headers": headers}, changed, tagged)


class Tog(Tag):
    name = "tog"


class Own:
    """The router's own form, between two of the others."""

    def __init__(self, app, *, router):
        pass

    async def dispatch(self, request, call_next):
        response = await call_next(request)
        response.headers["X-Own"] = "yes"
        return response


def function(app, *, router):
    """A middleware need not be a class. This one answers itself."""

    async def answer(scope, receive, send):
        await send({"type": "http.response.start", "status": 429, "headers": [(b"content-type", b"text/plain")]})
        await send({"type": "http.response.body", "body": scope["path"].encode(), "more_body": True})
        await send({"type": "http.response.body", "body": scope["query_string"]})

    return answer


def worker():
    async def echo(request):
        seen = {"routed": request.headers.getall("X-Routed"), "body": await request.json()}
        return web.json_response(seen, status=201)

    async def stream(request):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for chunk in STOP:
            await response.write(chunk)
            await asyncio.sleep(0.2)
        return response

    app = web.Application()
    app.router.add_post("/echo", echo)
    app.router.add_post("/stream", stream)
    return app


async def test_changes_reach_the_worker_and_the_client():
    paths = [f"{HERE}.Tag", f"{HERE}.Own", f"{HERE}.Tog"]
    async with routed(worker(), middleware_paths=paths) as (_, base, session):
        async with session.post(f"{base}/echo", json={"words": []}, headers={"X-Key": "1"}) as reply:
            assert reply.status == 201 and reply.headers.getall("X-Workers") == ["1", "1"]
            assert reply.headers["X-Own"] == "yes"
            assert await reply.json() == {"routed": ["tag", "tog"], "body": {"words": ["tag1", "tog1"]}}
        # An error of the router itself passes through them, too.
        status, _ = await json_of(session.post(f"{base}/add_worker", json={"words": []}, headers={"X-Key": ""}))
        assert status == 400


async def test_a_stream_is_passed_on_as_it_comes():
    async with routed(worker(), middleware_paths=[f"{HERE}.Tag", f"{HERE}.Tog"]) as (_, base, session):
        loop, times, chunks = asyncio.get_running_loop(), [], []
        async with session.post(f"{base}/stream", json={"words": []}, headers={"X-Key": ""}) as reply:
            assert reply.content_type == "text/event-stream" and "X-Workers" in reply.headers
            async for chunk in reply.content.iter_any():
                times.append(loop.time())
                chunks.append(chunk)
        assert b"".join(chunks) == b"".join(STOP) and times[-1] - times[0] > 0.3


async def test_it_may_answer_itself():
    async with routed(middleware_paths=[f"{HERE}.function"]) as (_, base, session):
        async with session.get(f"{base}/path?query=1") as reply:
            assert (reply.status, await reply.text()) == (429, "/pathquery=1")


async def test_a_client_that_hangs_up_ends_its_request_at_the_worker():
    ended = asyncio.Event()

    async def slow(request):
        try:
            await asyncio.sleep(30)
        finally:
            ended.set()

    app = web.Application(handler_args={"handler_cancellation": True})
    app.router.add_post("/generate", slow)
    async with routed(app, middleware_paths=[f"{HERE}.Tag"]) as (_, base, session):
        with pytest.raises(asyncio.TimeoutError):
            post = session.post(f"{base}/generate", json={"words": []}, headers={"X-Key": ""})
            await asyncio.wait_for(post, 0.3)
        await asyncio.wait_for(ended.wait(), 5)


async def test_starlette_middleware():
    base_class = pytest.importorskip("starlette.middleware.base").BaseHTTPMiddleware

    class Starlette(base_class):
        def __init__(self, app, *, router):
            super().__init__(app)
            self.router = router

        async def dispatch(self, request, call_next):
            seen = (await request.json())["words"]
            response = await call_next(request)
            response.headers["X-Seen"] = f"{seen} {request.method} {request.url.path}"
            return response

    globals()["Starlette"] = Starlette
    async with routed(worker(), middleware_paths=[f"{HERE}.Starlette"]) as (_, base, session):
        async with session.post(f"{base}/echo", json={"words": ["a"]}, headers={"X-Routed": "r"}) as reply:
            assert reply.status == 201 and reply.headers["X-Seen"] == "['a'] POST /echo"
            assert await reply.json() == {"routed": ["r"], "body": {"words": ["a"]}}
        async with session.post(f"{base}/stream", json={"words": []}) as reply:
            assert reply.content_type == "text/event-stream" and await reply.read() == b"".join(STOP)
