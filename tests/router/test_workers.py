"""Registration, both policies, quarantine."""

import pytest

from slime.router.workers import WorkerPool, normalize_url

pytestmark = pytest.mark.unit


def test_urls_have_one_spelling():
    assert normalize_url("127.0.0.1:30000") == normalize_url("http://127.0.0.1:30000/") == "http://127.0.0.1:30000"
    assert normalize_url("http://[::1]:80/") == "http://[::1]"
    for bad in ("", "ftp://a", "http://", None):
        with pytest.raises(ValueError):
            normalize_url(bad)


def test_fewest_in_flight_then_longest_idle():
    pool = WorkerPool()
    workers = [pool.add(f"h:{port}") for port in (1, 2, 3)]
    assert [pool.pick() for _ in range(6)] == workers * 2
    workers[0].in_flight = 2
    workers[1].in_flight = 1
    workers[2].in_flight = 3
    assert pool.pick() is workers[1]
    assert pool.pick({workers[1]}) is workers[0]
    assert pool.pick(workers) is None


def test_a_failed_worker_is_the_last_choice():
    pool = WorkerPool()
    first, second = pool.add("h:1"), pool.add("h:2")
    pool.fail(first)
    second.in_flight = 100
    assert pool.pick() is second
    assert pool.pick([second]) is first
    assert pool.add("h:1") is first and first.healthy


def test_quarantine_and_return():
    pool = WorkerPool(failure_threshold=2)
    first, second = pool.add("h:1"), pool.add("h:2")
    assert not pool.fail(first) and pool.fail(first) and not pool.fail(first)
    assert pool.pick([second]) is None and first.describe()["quarantined"]
    assert pool.succeed(first) and not pool.succeed(first)
    assert pool.pick([second]) is first


def test_keys_keep_their_worker_when_others_come_and_go():
    pool = WorkerPool()
    workers = [pool.add(f"h:{port}") for port in range(1, 5)]
    keys = [f"session-{i}" for i in range(2000)]
    before = {key: pool.pick(key=key) for key in keys}
    share = [sum(worker is w for w in before.values()) / len(keys) for worker in workers]
    assert all(0.15 < part < 0.35 for part in share)
    pool.fail(workers[0])
    moved = {key for key in keys if pool.pick(key=key) is not before[key]}
    assert moved == {key for key in keys if before[key] is workers[0]}
    pool.succeed(workers[0])
    assert all(pool.pick(key=key) is before[key] for key in keys)
    extra = pool.add("h:9")
    changed = [key for key in keys if pool.pick(key=key) is not before[key]]
    assert all(pool.pick(key=key) is extra for key in changed) and 0.1 < len(changed) / len(keys) < 0.3
    pool.remove(extra.worker_id)
    assert all(pool.pick(key=key) is before[key] for key in keys)


def test_remove_by_id_or_url():
    pool = WorkerPool()
    first, second = pool.add("h:1"), pool.add("h:2")
    assert pool.remove(first.worker_id) is first
    assert pool.remove("http://h:2/") is second
    assert pool.remove("http://h:2") is None and len(pool) == 0
