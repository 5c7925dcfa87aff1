"""A stock SGLang server owned by its Ray actor, on CPU."""

import psutil
import pytest

from slime.arguments.parser import resolve
from slime.backends.sglang_utils.compat import installed_version

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(600),
    pytest.mark.skipif(installed_version() is None, reason="SGLang is not installed"),
]


def test_life_of_an_engine(local_ray, tmp_path, tiny_model_dir):
    import ray

    from slime.ray.engines import create_engine
    from slime.ray.placement_group import create_placement_groups
    from slime.utils.served_models import one_group

    words = ["--hf-checkpoint", tiny_model_dir, "--device", "cpu", "--dtype", "float32", "--rollout-engine", "sglang"]
    args = resolve([*words, "--rollout-num-gpus", "1", "--run-dir", str(tmp_path)])
    args.offload_rollout, args.debug_rollout_only = True, True
    args.served_models = one_group(tiny_model_dir, 1, 1)
    engine = create_engine(args, create_placement_groups(args)["rollout"], args.served_models[0], 0)
    url = ray.get(engine.start.remote())
    assert ray.get(engine.url.remote()) == url
    ray.get([engine.health.remote(), engine.flush_cache.remote(), engine.pause_generation.remote("abort")])
    ray.get([engine.continue_generation.remote(), engine.abort_request.remote()])
    ray.get(engine.release_memory_occupation.remote())
    ray.get(engine.health.remote())
    ray.get(engine.resume_memory_occupation.remote(["weights"]))
    ray.get(engine.update_weights_from_disk.remote({"model_path": tiny_model_dir, "weight_version": "3"}))
    ray.get(engine.resume_memory_occupation.remote(["kv_cache"]))
    assert ray.get(engine.get_weight_version.remote()) == "3"
    pid = ray.get(engine.pids.remote())["engine-0"]
    children = psutil.Process(pid).children(recursive=True)
    scheduler = next(child for child in children if "scheduler" in " ".join([child.name(), *child.cmdline()]))
    death = engine.wait_for_death.remote()
    scheduler.kill()
    assert "engine-0" in ray.get(death, timeout=120)
    ray.get(engine.shutdown.remote())
    assert psutil.wait_procs(children, timeout=30)[1] == []
