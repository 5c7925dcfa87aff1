"""What the actors of engines on GPUs and over several nodes do beside SGLang itself: trivial servers stand for it."""

import os
import subprocess
import sys
import tempfile
import threading
import time
from argparse import Namespace

import pytest

from slime.ray.engine_actor import SGLangEngineActor, SGLangNodeActor, one_start_per_gpu
from slime.ray.server_process import ServerProcess

pytestmark = pytest.mark.integration

STARTS = """
import sys, time
from slime.ray.engine_actor import one_start_per_gpu
print("asks", flush=True)
with one_start_per_gpu(sys.argv[1:]):
    print(time.monotonic(), flush=True)
    sys.stdin.read()
"""


class Start:
    """A process that starts an engine on `gpus` until its input ends."""

    def __init__(self, *gpus: str) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen([sys.executable, "-c", STARTS, *gpus], text=True, **pipes)
        assert self.process.stdout.readline() == "asks\n"

    def began(self) -> float:
        """When it got the GPUs, on the clock that all processes share; waits for it."""
        return float(self.process.stdout.readline())

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


def test_one_start_at_a_time_per_gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # not the locks of engines that start on this machine
    monkeypatch.setattr(tempfile, "tempdir", None)
    starts = []
    try:
        with one_start_per_gpu(["0", "1"]):
            starts.append(Start("2", "1"))
            starts.append(Start("3"))
            beside = starts[1].began()
            released = time.monotonic()
        assert beside < released < starts[0].began()
        starts.append(Start("0", "2"))
        starts[0].kill()  # a start that dies leaves no lock
        starts[2].began()
        with one_start_per_gpu([]), one_start_per_gpu(["1"]):
            pass
    finally:
        for start in starts:
            start.kill()


SLEEPS = """
import time
time.sleep(1000)
"""
ENDS_ITS_FOLLOWER_FIRST = """
import os, signal, sys, time
def end(*_):
    os.kill(int(sys.argv[1]), signal.SIGKILL)
signal.signal(signal.SIGTERM, end)
open(sys.argv[2], "w").close()
while True:
    time.sleep(1000)
"""


def launch(name: str, directory, code: str, *words: str) -> ServerProcess:
    return ServerProcess(name, [sys.executable, "-c", code, *words], directory / f"{name}.log", "127.0.0.1")


class TestTwoNodes:
    """The engine's own actor runs in this process, that of its second node under Ray."""

    @pytest.fixture
    def engine(self, local_ray, tmp_path, monkeypatch):
        import ray

        class Follower(SGLangNodeActor.__ray_metadata__.modified_class):
            def start(self) -> int:
                self._server = launch(self.name, tmp_path, SLEEPS)
                return self._server.pid

        monkeypatch.setattr("slime.ray.server_process.TERMINATE_GRACE_SECS", 2.0)
        args = Namespace()
        follower = ray.remote(concurrency_groups={"watch": 1, "side": 2})(Follower).options(num_cpus=0)
        follower = follower.remote(args, 0, "engine-0-node-1", 1, [])
        engine = SGLangEngineActor.__ray_metadata__.modified_class(args, 0, "engine-0")
        engine._followers = [follower]
        engine.follower_pid = ray.get(follower.start.remote())
        ready = tmp_path / "ready"
        engine._server = launch("engine-0", tmp_path, ENDS_ITS_FOLLOWER_FIRST, str(engine.follower_pid), str(ready))
        while not ready.exists():
            engine._server.raise_if_dead()
            time.sleep(0.02)
        yield engine
        engine.shutdown()
        ray.kill(follower)

    @pytest.fixture
    def deaths(self, engine):
        """What `wait_for_death` returns, once it does."""
        found = []
        waiter = threading.Thread(target=lambda: found.append(engine.wait_for_death()), daemon=True)
        waiter.start()
        return lambda: waiter.join(30) or found

    def test_a_follower_that_ends_in_a_shutdown_is_no_death(self, engine, deaths):
        engine.shutdown()
        assert deaths() == [None]
        assert not os.path.exists(f"/proc/{engine.follower_pid}") and not engine._server.is_alive()

    def test_a_follower_that_dies_is_the_engine_s_death(self, engine, deaths):
        os.kill(engine.follower_pid, 9)
        (death,) = deaths()
        assert "engine-0-node-1" in death and "SIGKILL" in death
        assert engine._server.is_alive()
