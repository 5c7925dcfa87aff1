"""The HTTP client against a real server, and coroutines run from synchronous code."""

import asyncio
import threading

import pytest
from aiohttp import web

from slime.utils.async_utils import run
from slime.utils.http_utils import HttpError, close_session, get, post, session
from tests.rollout.support import served

pytestmark = pytest.mark.integration


def app_of(replies):
    """Answers with each of `replies` in turn: a status, or "drop" to cut the connection; then 200."""
    calls = []

    async def handle(request):
        calls.append(await request.text())
        reply = replies.pop(0) if replies else 200
        if reply == "drop":
            request.transport.abort()
            return web.Response()
        return web.json_response({"call": len(calls)}, status=reply)

    app = web.Application()
    app.router.add_route("*", "/x", handle)
    return app, calls


@pytest.fixture(autouse=True)
async def _close():
    yield
    await close_session()


async def test_retries_what_passes():
    app, calls = app_of([503, "drop", 500, 502])
    async with served(app) as url:
        assert await post(f"{url}/x", {"a": 1}) == {"call": 5}
        assert calls == ['{"a": 1}'] * 5


async def test_a_client_error_is_raised_at_once():
    app, calls = app_of([404])
    async with served(app) as url:
        with pytest.raises(HttpError, match=r'GET http.*/x answered 404: {"call": 1}') as error:
            await get(f"{url}/x")
        assert error.value.status == 404 and len(calls) == 1


async def test_a_lasting_server_error_is_raised_soon():
    app, calls = app_of([500] * 10)
    async with served(app) as url:
        with pytest.raises(HttpError, match="answered 500"):
            await post(f"{url}/x")
        assert len(calls) == 3


async def test_connections_are_refused_for_ever():
    with pytest.raises(OSError):
        await post("http://127.0.0.1:9/x", max_retries=1)


def test_one_session_per_loop():
    async def mine():
        return session() is session()

    assert asyncio.run(mine())
    seen = []

    async def remember():
        seen.append(session())
        await close_session()

    asyncio.run(remember())
    asyncio.run(remember())
    assert seen[0] is not seen[1]


def test_run_uses_one_persistent_loop_and_refuses_to_wait_for_itself():
    async def loop():
        return asyncio.get_running_loop(), threading.current_thread().name

    assert run(loop()) == run(loop())
    assert run(loop())[1] == "slime-async"

    async def nested():
        return run(loop())

    with pytest.raises(RuntimeError, match="await instead"):
        run(nested())


def test_errors_and_watchdog_reach_the_caller():
    async def fail():
        raise KeyError("x")

    with pytest.raises(KeyError):
        run(fail())

    async def forever():
        await asyncio.Event().wait()

    def bark():
        raise TimeoutError("stuck")

    with pytest.raises(TimeoutError, match="stuck"):
        run(forever(), watchdog=bark, interval=0.05)
