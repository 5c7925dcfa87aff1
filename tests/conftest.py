"""Shared fixtures: a tiny model with tokenizer, built in code (nothing is fetched from a hub), and a local Ray."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from collections import Counter

import pytest

from tests.tiny_model import save_tiny_model


def pytest_collection_modifyitems(config, items):
    """With several workers the files that take longest come first, so that all workers end at about the same time."""
    if hasattr(config, "workerinput"):
        system = Counter(item.path for item in items if item.get_closest_marker("system"))
        integration = Counter(item.path for item in items if item.get_closest_marker("integration"))
        items.sort(key=lambda item: (-system[item.path], -integration[item.path]))


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory) -> str:
    """A random two-layer Qwen3 (64 hidden, 4 heads, 2 KV heads, vocabulary 128) with a word-level tokenizer."""
    path = tmp_path_factory.mktemp("tiny-model")
    save_tiny_model(str(path))
    return str(path)


@pytest.fixture(scope="session")
def local_ray() -> str:
    """A local Ray to which this process is connected; the address, for whole runs that need none of their own.

    Starting Ray takes as much processor time as all else that a tiny run's driver does. No worker starts before it is
    needed: the slots are more than a test takes.
    """
    import ray

    from slime.ray.temp_dir import RayTempDir

    temp_dir = RayTempDir()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_prestart_worker_first_driver", "0")
        environment.setenv("RAY_enable_worker_prestart", "0")
        ray.init(
            address="local",
            num_cpus=16,
            num_gpus=0,
            include_dashboard=False,
            object_store_memory=256 * 1024**2,
            log_to_driver=False,
            logging_level="error",
            _node_ip_address="127.0.0.1",
            _temp_dir=str(temp_dir.path),
        )
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()
    temp_dir.remove()
