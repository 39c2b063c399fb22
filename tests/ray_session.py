"""A small Ray for the tests of one module, with more CPUs than the machine has, since the environments are tiny."""

import pytest


@pytest.fixture(scope="module")
def ray_session():
    ray = pytest.importorskip("ray")
    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        object_store_memory=300 << 20,
        logging_level="ERROR",
        log_to_driver=False,
    )
    yield ray
    ray.shutdown()
