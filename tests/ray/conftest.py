"""One small local Ray for the tests of this directory."""

import os

import pytest


@pytest.fixture(scope="session")
def local_ray():
    import ray

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(
        address="local",
        num_cpus=4,
        num_gpus=0,
        include_dashboard=False,
        object_store_memory=100 * 1024**2,
        log_to_driver=False,
        logging_level="error",
        _node_ip_address="127.0.0.1",
    )
    yield
    ray.shutdown()
