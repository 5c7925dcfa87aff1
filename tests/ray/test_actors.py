"""Placement, engine actors and the session's waiting, on a real local Ray."""

import re
import subprocess
import sys
from argparse import Namespace

import psutil
import pytest

from slime.ray.placement_group import create_placement_groups, total_slots
from slime.ray.session import RunError, Session

pytestmark = pytest.mark.integration


def sizes(**changes):
    values = {
        "device": "cpu",
        "colocate": False,
        "debug_train_only": False,
        "debug_rollout_only": False,
        "actor_num_nodes": 1,
        "actor_num_gpus_per_node": 2,
        "rollout_num_gpus": 1,
        "rollout_external": False,
    }
    return Namespace(**{**values, **changes})


@pytest.mark.unit
def test_slots():
    assert total_slots(sizes()) == 3
    assert total_slots(sizes(colocate=True, rollout_num_gpus=2)) == 2
    assert total_slots(sizes(debug_train_only=True)) == 2
    assert total_slots(sizes(debug_rollout_only=True)) == 1


def test_slices(local_ray):
    from ray.util.placement_group import remove_placement_group

    slices = create_placement_groups(sizes())
    assert slices["actor"].bundle_indices == (0, 1) and slices["rollout"].bundle_indices == (2,)
    remove_placement_group(slices["actor"].pg)
    shared = create_placement_groups(sizes(colocate=True, rollout_num_gpus=2))
    assert shared["actor"].bundle_indices == shared["rollout"].bundle_indices == (0, 1)
    remove_placement_group(shared["actor"].pg)
    none = create_placement_groups(sizes(debug_rollout_only=True, rollout_external=True))
    assert len(none["actor"]) == len(none["rollout"]) == 0
    with pytest.raises(RuntimeError, match="needs 99 CPU slots"):
        create_placement_groups(sizes(actor_num_gpus_per_node=98))


def test_engine_actor(local_ray, tmp_path, tiny_model_dir):
    import ray

    from slime.ray.engine_actor import EmbeddedEngineActor

    args = Namespace(
        run_dir=str(tmp_path),
        hf_checkpoint=tiny_model_dir,
        device="cpu",
        dtype="float32",
        seed=1,
        trust_remote_code=False,
        sglang_dtype=None,
        sglang_max_running_requests=8,
        sglang_max_total_tokens=2048,
        sglang_context_length=None,
        sglang_page_size=16,
        sglang_chunked_prefill_size=None,
        sglang_mem_fraction_static=None,
        true_on_policy_mode=False,
    )
    engine = EmbeddedEngineActor.options(num_cpus=0).remote(args, 0, "engine-0")
    url = ray.get(engine.start.remote())
    assert ray.get(engine.url.remote()) == url
    ray.get([engine.health.remote(), engine.flush_cache.remote(), engine.pause_generation.remote("abort")])
    ray.get([engine.continue_generation.remote(), engine.abort_request.remote()])
    ray.get([engine.release_memory_occupation.remote(), engine.resume_memory_occupation.remote(["weights"])])
    assert isinstance(ray.get(engine.get_weight_version.remote()), str)
    pid = ray.get(engine.pids.remote())["engine-0"]
    death = engine.wait_for_death.remote()
    ray.get(engine.shutdown.remote())
    assert ray.get(death) is None and not psutil.pid_exists(pid)
    ray.kill(engine)

    broken = EmbeddedEngineActor.options(num_cpus=0).remote(
        Namespace(**{**vars(args), "hf_checkpoint": "/nowhere"}), 1, "engine-1"
    )
    with pytest.raises(Exception, match=r"engine-1[\s\S]*/nowhere"):
        ray.get(broken.start.remote())
    ray.kill(broken)


def test_an_engine_ends_with_its_actor(local_ray, tmp_path, tiny_model_dir):
    import ray

    from slime.ray.server_process import ServerProcess

    @ray.remote(num_cpus=0)
    class Owner:
        def start(self):
            import sys

            command = [sys.executable, "-m", "slime.router.server", "--host", "127.0.0.1", "--port", "0"]
            self.server = ServerProcess("router", command, tmp_path / "router.log", "127.0.0.1")
            self.server.wait_until_healthy(timeout=60)
            return self.server.pid

    owner = Owner.remote()
    process = psutil.Process(ray.get(owner.start.remote()))
    ray.kill(owner)
    process.wait(timeout=20)


class TestWait:
    """`Session.wait` without starting a run."""

    @pytest.fixture
    def session(self, tmp_path):
        args = Namespace(
            run_dir=str(tmp_path),
            save=None,
            loss_type="policy_loss",
            phase_timeout_secs=None,
            use_tensorboard=False,
            use_wandb=False,
            wandb_always_use_train_step=False,
        )
        return Session(args)

    @pytest.fixture
    def worker(self, local_ray, session):
        import ray

        @ray.remote(num_cpus=0, max_concurrency=4)
        class Worker:
            def work(self, value, seconds=0.0):
                import time

                time.sleep(seconds)
                if value == "fail":
                    raise KeyError("wrong key")
                return value

            def pid(self):
                import os

                return os.getpid()

            def log_to(self, path):
                from slime.observability import stacks
                from slime.observability.run_dir import redirect_output

                redirect_output(path)
                stacks.dump_on_signal()

            def waiting(self):
                from slime.observability.stacks import describe_tasks
                from slime.utils.async_utils import running_loop

                return describe_tasks(running_loop())

            def stuck(self):
                import os

                from slime.utils.async_utils import run, wait_for_exit

                run(wait_for_exit(os.getpid()))

            def die(self):
                import os

                print("last words", flush=True)
                os._exit(3)

        worker = session.name_actor(Worker.remote(), "train-0")
        yield worker
        ray.kill(worker)

    def test_results_keep_their_order(self, session, worker):
        assert session.wait([worker.work.remote(1, 0.2), worker.work.remote(2)]) == [1, 2]
        assert session.wait(worker.work.remote(3)) == 3

    def test_the_first_failure_ends_the_wait(self, session, worker):
        with pytest.raises(RunError, match="train-0: KeyError: 'wrong key'"):
            session.wait([worker.work.remote(1, 100.0), worker.work.remote("fail")])

    def test_a_guard_ends_the_wait(self, session, worker):
        session.guard(worker.work.remote(None))
        session.guard(worker.work.remote("engine-0 was killed by SIGKILL", 0.3))
        with pytest.raises(RunError, match="engine-0 was killed"):
            session.wait(worker.work.remote(1, 100.0))

    def test_events_are_handled_while_waiting(self, session, worker):
        seen, values = [], iter([1, 2, 3])

        def handle(value):
            seen.append((value, session.wait(worker.work.remote("inside"))))

        session.on_event(lambda: worker.work.remote(next(values), 0.2 if len(seen) < 2 else 100.0), handle)
        assert session.wait(worker.work.remote("outside", 1.5)) == "outside"
        assert seen == [(1, "inside"), (2, "inside")]

    def test_a_stuck_phase_says_what_each_process_does(self, session, worker):
        import ray

        session.args.phase_timeout_secs = 1.0
        ray.get(worker.log_to.remote(str(session.run_dir.log_file("train-0"))))
        stopped = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
        session.track_memory({"train-0": ray.get(worker.pid.remote()), "engine-0": stopped.pid})
        session.explain_with("train-0", worker.waiting.remote)
        with session.metrics.phase("rollout 3/9: training"), pytest.raises(RunError) as caught:
            session.wait(worker.stuck.remote())
        stopped.kill()
        stopped.wait()
        message = str(caught.value)
        assert "rollout 3/9: training has taken more than --phase-timeout-secs 1." in message
        assert "train-0: run (slime/utils/async_utils.py" in message
        assert re.search(r"train-0: .*; coroutines: 1 x wait_for_exit \(async_utils.py:\d+\)", message)
        assert "engine-0: no stacks of this kind of process" in message
        assert session.wait(worker.work.remote(3)) == 3

    def test_without_a_limit_a_long_wait_is_reported_and_goes_on(self, session, worker, monkeypatch, capsys):
        import ray

        monkeypatch.setattr("slime.ray.session.STUCK_REPORT_SECS", 1.0)
        ray.get(worker.log_to.remote(str(session.run_dir.log_file("train-0"))))
        session.track_memory({"train-0": ray.get(worker.pid.remote())})
        with session.metrics.phase("rollout 3/9: training"):
            assert session.wait(worker.work.remote("late", 2.5)) == "late"
        reports = capsys.readouterr().out.split("rollout 3/9: training has taken ")[1:]
        assert len(reports) == 2 and all("train-0: " in report for report in reports), reports
        assert "so far; --phase-timeout-secs would end it" in reports[0]

    def test_a_dead_actor_is_named(self, session, worker):
        session.run_dir.log_file("train-0").write_text("the end of the log")
        session.args.save = str(session.run_dir.path)
        (session.run_dir.path / "latest_checkpointed_iteration.txt").write_text("3")
        with pytest.raises(RunError, match=r"train-0 died[\s\S]*the end of the log[\s\S]*--load .* continues"):
            session.wait(worker.die.remote())
