"""Several trainer ranks that send, each to its engines: who sends where, and what a lost engine does to the others."""

import os
import signal
import time
from datetime import timedelta

import pytest

from slime.engine.weights import _checksum
from slime.weight_sync import distributed
from slime.weight_sync.distributed import share_engines
from tests.backends.trainers import parameters_of, run_world, train_rollout
from tests.engine.server_process import EngineServer
from tests.weight_sync.test_transports import generate, make_local_trainer, message_of

NOBODY = "http://127.0.0.1:9"


@pytest.mark.unit
@pytest.mark.parametrize(
    ("trainers", "engines", "shares"),
    [
        ("a", "a", {0: [0]}),
        ("aa", "b", {0: [0]}),
        ("aaaa", "bb", {0: [0], 2: [1]}),
        ("aa", "bbb", {0: [0, 2], 1: [1]}),
        ("aabb", "cccccc", {0: [0, 4], 1: [1, 5], 2: [2], 3: [3]}),
        ("aaaabbbb", "ba", {0: [1], 4: [0]}),
        ("aabb", "bbac", {0: [2], 1: [3], 2: [0], 3: [1]}),
        ("ab", "aaaa", {0: [0, 1], 1: [2, 3]}),
        ("aab", "aaaa", {0: [0, 2], 1: [1, 3]}),
    ],
)
def test_who_sends_where(trainers, engines, shares):
    """A letter is a node."""
    assert share_engines(trainers, engines) == shares


@pytest.fixture(scope="module")
def servers(tiny_model_dir, tmp_path_factory):
    started = [EngineServer(tiny_model_dir, tmp_path_factory.mktemp(f"engine-{i}")) for i in range(3)]
    try:
        yield [server.wait() for server in started]
    finally:
        for server in started:
            server.stop()


def serving(trainer, servers):
    """After another step of training and an update: the version, and whether each engine has every byte of it."""
    train_rollout(trainer, trainer.optimizer.steps_done)
    trainer.update_weights()
    expected = {name: _checksum(tensor) for name, tensor in parameters_of(trainer).items()}
    same = [checksums(server) == expected for server in servers]
    distributed.dist.barrier()
    return trainer.updater.version, same


def checksums(server):
    (rank,) = server.ok("/weights_checker", {"action": "checksum"})["ranks"]
    return rank["checksums"]


def connect(trainer, urls):
    trainer.set_rollout_engines(urls, [[i] for i in range(len(urls))])
    return trainer.updater.transport.sends


def two_senders(rank, world_size, port, model_dir, servers, pid):
    """Two ranks and three engines, of which the second is killed in the middle of an update."""
    distributed.FORMATION_TIMEOUT = timedelta(seconds=6)
    trainer = make_local_trainer(rank, world_size, port, model_dir, colocate=False)
    first, second, third = urls = [server.url for server in servers]
    out = {"sends to three": connect(trainer, urls)}
    out["three"] = serving(trainer, servers)
    trainer.check_weights()
    out["sends to one"] = connect(trainer, [third])
    out["one"] = serving(trainer, servers[2:])
    out["sends to two"] = connect(trainer, [first, second])
    out["two"] = serving(trainer, servers[:2])

    transport, sent = trainer.updater.transport, []

    def send_then_kill(*bucket, send=transport.send):
        send(*bucket)
        sent.append(bucket)
        if len(sent) == 2 and rank == 1:
            os.kill(pid, signal.SIGKILL)

    transport.send = send_then_kill
    start = time.monotonic()
    out["killed"] = message_of(trainer.update_weights)
    out["not joined"] = message_of(lambda: connect(trainer, [first, NOBODY, third]))
    out["seconds"] = time.monotonic() - start
    connect(trainer, [first, third])
    out["others"] = serving(trainer, servers[::2])
    out["reply"] = generate(first)["meta_info"]["weight_version"]
    trainer.dispose()
    return out


class Remote:
    """A server as a trainer's process sees it."""

    def __init__(self, url):
        self.url = url

    ok, request = EngineServer.ok, EngineServer.request


@pytest.mark.integration
def test_each_rank_sends_to_its_engines(tiny_model_dir, servers):
    remotes = [Remote(server.url) for server in servers]
    results = run_world(two_senders, 2, tiny_model_dir, remotes, servers[1].process.pid)
    assert [result["sends to three"] for result in results] == [True, True]
    assert [result["sends to one"] for result in results] == [True, False]
    assert [result["sends to two"] for result in results] == [True, True]
    for result in results:
        assert [result[kind] for kind in ("three", "one", "two", "others")] == [
            (1, [True] * 3),
            (2, [True]),
            (3, [True] * 2),
            (4, [True] * 2),
        ]
        assert servers[1].url in result["killed"] and "/update_weights_from_distributed" in result["killed"]
        assert NOBODY in result["not joined"] and "/init_weights_update_group" in result["not joined"]
        assert result["seconds"] < 30 and result["reply"] == "4"
    assert results[0]["killed"].startswith("trainer rank 1 could not send")


def never_joins(rank, world_size, port, model_dir, url):
    distributed.FORMATION_TIMEOUT = timedelta(seconds=6)
    trainer = make_local_trainer(rank, world_size, port, model_dir, colocate=False)
    message = message_of(lambda: connect(trainer, [url, NOBODY]))
    start = time.monotonic()
    connect(trainer, [url])
    return message, time.monotonic() - start


@pytest.mark.integration
def test_an_engine_that_never_joins_does_not_hold_up_the_others(tiny_model_dir, servers):
    """Here both are in the group of the one sender."""
    ((message, seconds),) = run_world(never_joins, 1, tiny_model_dir, servers[0].url)
    assert "did not answer /init_weights_update_group" in message
    assert seconds < 6
