"""The background worker against real HTTP servers: router and engines that speak the protocol."""

import threading
import time

import pytest

from slime.rollout import fully_async_rollout
from slime.rollout.data_source import RolloutDataSource, RolloutDataSourceWithBuffer
from slime.rollout.errors import HookFailure, RewardError
from slime.rollout.fully_async_rollout import generate_rollout
from slime.utils.async_utils import run
from slime.utils.misc import flatten
from tests.rollout import hooks
from tests.rollout.support import ScriptedEngine
from tests.rollout.test_sglang_rollout import hang_on_rows_from

HOOKS = "tests.rollout.hooks."
pytestmark = pytest.mark.integration


@pytest.fixture(autouse=True)
def _leave_nothing_running():
    hooks.CALLS.clear()
    yield
    for worker in list(fully_async_rollout._workers.values()):

        async def stop(worker=worker):
            worker.holding = True
            for task in list(worker.running):
                task.cancel()

        run(stop())
    fully_async_rollout._workers.clear()


def wait_until(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def worker_of(source):
    return fully_async_rollout._workers[source]


def indices(output):
    return [s.index for s in flatten(output.samples)]


def test_it_generates_on_between_rollouts_and_trains_on_each_sample_once(cluster_of, rollout_args):
    cluster = cluster_of()
    args = rollout_args(custom_rm_path=HOOKS + "reward_parity", rows=80, sglang_router_port=cluster.port)
    source = RolloutDataSourceWithBuffer(args)
    outputs = [generate_rollout(args, 0, source)]
    worker = worker_of(source)
    wait_until(lambda: len(worker.waiting) >= 4 and not worker.running)  # a whole rollout waits: no more prompts
    assert len(worker.waiting) < 8
    outputs += [generate_rollout(args, i, source) for i in range(1, 6)]
    seen = [index for output in outputs for index in indices(output)]
    assert len(seen) == len(set(seen)) == 48
    for sample in flatten(o.samples for o in outputs):
        assert sample.reward in (0.0, 1.0) and not sample.aborted
    assert outputs[1].metrics["rollout/fully_async/waiting_groups"] >= 0


def test_a_checkpoint_holds_everything_and_a_resumed_run_repeats_nothing(cluster_of, rollout_args, tmp_path):
    engine = ScriptedEngine(hang_when=hang_on_rows_from(5))
    cluster = cluster_of(engine)
    args = rollout_args(
        custom_rm_path=HOOKS + "reward_parity", rows=16, over_sampling_batch_size=6, save=str(tmp_path / "save"),
        load=str(tmp_path / "save"), sglang_router_port=cluster.port,
        rollout_sample_hook_path=[HOOKS + "count_hook"],
    )  # fmt: skip
    source = RolloutDataSourceWithBuffer(args)
    first = generate_rollout(args, 0, source)
    wait_until(lambda: len(engine.running) >= 6)
    source.save(0)
    wait_until(lambda: len(engine.running) >= 6)  # they go on afterwards
    assert engine.aborts >= 1 and len(worker_of(source).running) >= 3

    engine.hang_when = lambda payload: False
    engine.version = "2"
    generated = len(engine.requests)
    resumed = RolloutDataSourceWithBuffer(args)
    resumed.load(0)
    partial = {s.index: s.clone() for s in flatten(resumed.buffer) if s.aborted and s.response_length}
    whole = {s.index: s.clone() for s in flatten(resumed.buffer) if s.reward is not None}
    assert partial and not set(indices(first)) & {s.index for s in flatten(resumed.buffer)}
    rest = [s for i in range(1, 4) for s in flatten(generate_rollout(args, i, resumed).samples)]
    with worker_of(resumed).hold() as in_hand:
        everything = [*indices(first), *(s.index for s in rest), *(s.index for s in flatten(in_hand))]
        assert sorted(everything) == list(range(resumed.sample_index))
    for sample in rest:
        if sample.index in partial:
            kept = partial[sample.index].response_length
            assert sample.tokens[: len(partial[sample.index].tokens)] == partial[sample.index].tokens
            assert sample.weight_version_spans[0] == ("1", 0, kept)
            assert sample.weight_version_spans[1] == ("2", kept, sample.response_length)
        if sample.index in whole:
            assert sample.tokens == whole[sample.index].tokens
        assert sample.metadata["hooked"] == 1
    # Only what was not finished has been asked for again.
    again = [r for r in engine.requests[generated:] if len(r["input_ids"]) > 9]
    assert len(again) >= len(partial)


def test_weights_that_change_in_mid_request_and_the_bound(cluster_of, rollout_args):
    """The engines' version rises with each rollout; no sample is older than the limit when it is taken."""
    engine = ScriptedEngine(token_seconds=0.004)
    cluster = cluster_of(engine)
    args = rollout_args(
        custom_rm_path=HOOKS + "reward_parity", rows=200, over_sampling_batch_size=12, rollout_max_response_len=60,
        max_weight_staleness=1, sglang_router_port=cluster.port,
    )  # fmt: skip
    source = RolloutDataSourceWithBuffer(args)
    ages = []
    for rollout_id in range(8):
        engine.version = str(rollout_id + 1)
        output = generate_rollout(args, rollout_id, source)
        for sample in flatten(output.samples):
            ages += [rollout_id + 1 - int(version) for version, _, _ in sample.weight_version_spans]
    assert max(ages) == 1 and min(ages) == 0


def test_prompts_are_held_back_not_thrown_away(cluster_of, rollout_args):
    cluster = cluster_of()
    args = rollout_args(
        custom_rm_path=HOOKS + "reward_parity", rows=40, over_sampling_batch_size=16, max_weight_staleness=0,
        sglang_router_port=cluster.port,
    )  # fmt: skip
    source = RolloutDataSourceWithBuffer(args)
    for rollout_id in range(3):
        for engine in cluster.engines:
            engine.version = str(rollout_id + 1)
        output = generate_rollout(args, rollout_id, source)
        assert indices(output) == list(range(8 * rollout_id, 8 * rollout_id + 8))
        assert {v for s in flatten(output.samples) for v in s.weight_versions} == {str(rollout_id + 1)}
    assert source.sample_group_index == 12 and output.metrics["perf/held_back_time"] > 0


def test_filters_hooks_and_evaluation(cluster_of, rollout_args):
    cluster = cluster_of()
    args = rollout_args(
        custom_rm_path=HOOKS + "reward_parity", rows=80, sglang_router_port=cluster.port,
        dynamic_sampling_filter_path=HOOKS + "filter_odd_groups",
        rollout_all_samples_process_path=HOOKS + "all_samples",
        rollout_sample_filter_path=HOOKS + "remove_first",
    )  # fmt: skip
    source = RolloutDataSourceWithBuffer(args)
    output = generate_rollout(args, 0, source)
    assert all(g[0].group_index % 2 == 0 and g[0].remove_sample and not g[1].remove_sample for g in output.samples)
    ((_, seen, passed),) = hooks.CALLS
    assert seen >= 4 + output.metrics["rollout/dynamic_filter/drop_odd"] and passed is source
    assert generate_rollout(args, 0, source, evaluation=True).data == {}
    assert len(generate_rollout(args, 1, source).samples) == 4


def test_a_failure_is_raised_by_the_rollout_that_runs_or_the_next(cluster_of, rollout_args):
    cluster = cluster_of()
    args = rollout_args(custom_rm_path=HOOKS + "reward_raises_from_8", rows=40, sglang_router_port=cluster.port)
    source = RolloutDataSourceWithBuffer(args)
    said = r"raised ZeroDivisionError: no judge today \(.*hooks\.py:\d+\) \(sample \d+ of group \d+\)"
    with pytest.raises(RewardError, match=said):
        for rollout_id in range(2):
            generate_rollout(args, rollout_id, source)


def test_a_data_source_that_cannot_save_work_in_hand_is_refused(rollout_args):
    args = rollout_args()
    with pytest.raises(HookFailure, match=r"--data-source-path .*RolloutDataSource cannot save"):
        generate_rollout(args, 0, RolloutDataSource(args))


def test_the_engine_aborts_everything_now_and_then(cluster_of, rollout_args):
    """As a weight update with --update-weights-pause-mode abort does: requests go on where they were."""
    engine = ScriptedEngine(token_seconds=0.003)
    cluster = cluster_of(engine)
    args = rollout_args(
        custom_rm_path=HOOKS + "reward_parity", rows=80, rollout_max_response_len=100, sglang_router_port=cluster.port
    )
    source = RolloutDataSourceWithBuffer(args)
    stop = threading.Event()

    def disturb():
        while not stop.wait(0.05):
            cluster.loop.call_soon_threadsafe(lambda: [event.set() for event in list(engine.running)])

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        outputs = [generate_rollout(args, i, source) for i in range(3)]
    finally:
        stop.set()
        thread.join()
    samples = list(flatten(o.samples for o in outputs))
    assert len({s.index for s in samples}) == 24
    assert any(len(s.weight_versions) > 1 for s in samples)
    for sample in samples:
        assert len(sample.rollout_log_probs) == sample.response_length == len(sample.tokens) - 9
