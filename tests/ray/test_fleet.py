"""A fleet under its health monitor: real engines on a real local Ray, without trainers."""

import os
import signal
import time
from collections.abc import Callable

import pytest

from slime.arguments.entry import load_args
from slime.ray.fleet import EngineFleet, Phase, State
from slime.ray.health_monitor import HealthMonitor
from slime.ray.placement_group import create_placement_groups
from tests.system.runs import write_prompts

pytestmark = pytest.mark.integration


@pytest.fixture
def fleet(local_ray, tmp_path, tiny_model_dir):
    """One embedded engine that serves; to be probed each half second and given four seconds to answer."""
    from ray.util.placement_group import remove_placement_group

    prompts = str(write_prompts(tmp_path / "prompts.jsonl", 1))
    args = load_args(
        ["--train-backend", "fsdp", "--device", "cpu", "--hf-checkpoint", tiny_model_dir, "--prompt-data", prompts]
        + ["--rollout-batch-size", "1", "--global-batch-size", "1", "--num-rollout", "1", "--rm-type", "math"]
        + ["--rollout-max-response-len", "8", "--run-dir", str(tmp_path), "--colocate", "--use-fault-tolerance"]
        + ["--actor-num-gpus-per-node", "1", "--rollout-health-check-interval", "0.5"]
        + ["--rollout-health-check-timeout", "4", "--rollout-health-check-first-wait", "0"]
    )
    placement = create_placement_groups(args)["rollout"]
    fleet = EngineFleet(args, placement, args.served_models[0])
    try:
        fleet.start()
        fleet.prepare_update()
        fleet.finish_update()
        yield fleet
    finally:
        fleet.dispose()
        remove_placement_group(placement.pg)


def eventually(fleet: EngineFleet, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline and fleet.fatal is None
        fleet.disposed.wait(0.05)


def test_an_engine_that_hangs_while_it_waits_for_weights_is_replaced(fleet):
    import ray

    (engine,) = fleet.engines
    first = engine.url
    engine.state = State.UNSYNCED  # as after a restart
    assert fleet.phase is Phase.SERVING and fleet.wait_for_unsynced() == [(0, first, [0])]

    # Paused, as while it gets weights, it answers no generation and is left alone.
    ray.get(engine.actor.pause_generation.remote("in_place"))
    HealthMonitor(fleet).start()
    probes = set()
    eventually(fleet, lambda: len(probes.add(engine.probed_at) or probes) == 4)
    assert engine.state is State.UNSYNCED and fleet.restarts == 0

    os.kill(ray.get(engine.actor.pids.remote())[engine.name], signal.SIGSTOP)
    eventually(fleet, lambda: fleet.restarts == 1)
    ((_, second, _),) = fleet.wait_for_unsynced()
    assert second != first
    fleet.admit(0, first)  # weights that went to the one before
    assert engine.state is State.UNSYNCED
    fleet.admit(0, second)
    assert engine.state is State.SERVING
