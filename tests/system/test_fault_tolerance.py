"""Engines and routers that die or hang in mid-run: the run goes on, and every sample is trained on once; and engines
that are not the run's own."""

import os
import signal

import psutil
import pytest

from tests.engine.server_process import EngineServer
from tests.system.runs import TrainRun

pytestmark = [pytest.mark.system, pytest.mark.timeout(420)]
FLAGS = ["--use-fault-tolerance", "--rollout-health-check-interval", 1, "--rollout-health-check-timeout", 4]
FLAGS += ["--rollout-health-check-first-wait", 0, "--custom-rm-path", "tests.system.hooks.slowly_even_tokens"]


def find(run, words) -> list[psutil.Process]:
    return [p for p in run.processes() if any(words in word for word in p.cmdline())]


def restarts(run) -> int:
    return (run.path / "logs" / "rollout-manager.log").read_text().count("serves again at")


def check_all_trained_once(run, rollouts):
    assert run.gone_within(0)
    assert [line["rollout_id"] for line in run.trained()] == list(range(rollouts))
    assert sorted(i for line in run.trained() for i in line["sample_indices"]) == list(range(16 * rollouts))
    # What restarted engines generated came from the trainers' weights.
    assert max(m["train/train_rollout_logprob_abs_diff"] for m in run.metrics("train/step")) < 1e-5


def test_two_engines_and_the_router_beside_two_trainers(tmp_path, tiny_model_dir):
    flags = [*FLAGS, "--rollout-num-gpus", 2, "--actor-num-gpus-per-node", 2, "--balance-data", "--num-rollout", 8]
    run = TrainRun(tmp_path, tiny_model_dir, *flags)
    run.wait_for(lambda: len(run.trained()) >= 1)
    first, second = find(run, "slime.engine.server")
    first.send_signal(signal.SIGKILL)
    run.wait_for(lambda: restarts(run) == 1)
    second.send_signal(signal.SIGSTOP)
    run.wait_for(lambda: restarts(run) == 2)
    done = len(run.trained())
    os.kill(find(run, "slime.router.server")[0].pid, signal.SIGKILL)
    run.wait_for(lambda: len(run.trained()) >= done + 1)
    assert run.finish() == 0, run.stderr
    check_all_trained_once(run, 8)
    versions = [{v for s in run.samples(f"rollout_{i:06d}") for v in s["weight_versions"]} for i in range(8)]
    assert all(len(v) == 1 for v in versions) and len(set.union(*versions)) == 8
    logs = {path.name for path in (run.path / "logs").iterdir()}
    assert {"engine-0.log", "engine-1.log", "train-0.log", "train-1.log"} <= logs


def test_the_only_engine_under_colocation(tmp_path, tiny_model_dir):
    """In mid-rollout the rollout waits for its return; while the trainer has the memory, the next sync does."""
    run = TrainRun(tmp_path, tiny_model_dir, *FLAGS, "--colocate", "--num-rollout", 6)
    log = run.path / "logs" / "driver.log"
    run.wait_for(lambda: "rollout 1/6: generating ..." in (log.read_text() if log.exists() else ""))
    engine = find(run, "slime.engine.server")[0]  # now: looking for it takes as long as a rollout generates
    run.wait_for(lambda: "rollout 2/6: generating ..." in log.read_text())
    engine.kill()
    run.wait_for(lambda: restarts(run) == 1)
    run.wait_for(lambda: "rollout 4/6: training ..." in log.read_text())
    for process in find(run, "ray::EmbeddedEngineActor"):
        process.kill()
    assert run.finish() == 0, run.stderr
    assert "engine-0 restarted; serves again with the current weights" in run.stdout
    check_all_trained_once(run, 6)


def test_external_engine_fed_with_deltas_through_disk(tmp_path, tiny_model_dir, local_ray):
    engine = EngineServer(tiny_model_dir, tmp_path)
    try:
        address = engine.wait().url.removeprefix("http://")
        flags = ["--rollout-external", "--rollout-external-engine-addrs", address, "--num-rollout", 3]
        flags += ["--update-weight-transport", "disk", "--update-weight-mode", "delta"]
        flags += ["--update-weight-disk-dir", tmp_path / "shared"]
        flags += ["--update-weight-local-checkpoint-dir", tmp_path / "local"]
        run = TrainRun(tmp_path, tiny_model_dir, *flags, ray=local_ray)
        assert run.finish() == 0, run.stderr
        check_all_trained_once(run, 3)
        assert engine.ok("/get_model_info")["weight_version"] == "4"  # alive, with the last weights
        written = [m["perf/update_weights_bytes"] for m in run.metrics("rollout/step")]
        assert min(written) > 0
    finally:
        engine.stop()
