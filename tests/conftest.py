"""Fixtures that tests of several folders use, and in which order and processes tests run."""

import re

import pytest
from helpers.cpp_sdk import EXAMPLES, build
from helpers.leftovers import (  # noqa: F401
    no_process_is_left,
    no_process_is_left_at_the_end,
    pytest_runtest_setup,
)

HEAVY = ("ray", "cpp", "test_topologies", "test_resume", "test_data_parallel", "test_examples", "test_process_backend")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Group tests for `--dist loadgroup`, the longest groups first, and mark what a class leaves to `slow`."""
    groups = {}
    for item in items:
        if re.match(getattr(item.cls, "slow_tests", "$"), item.name):
            item.add_marker(pytest.mark.slow)
        groups[item] = item.path.stem
        if item.get_closest_marker("ray"):
            groups[item] = "ray"
        elif "built" in item.fixturenames:
            groups[item] = "cpp"
        item.add_marker(pytest.mark.xdist_group(groups[item]))
    items.sort(key=lambda item: HEAVY.index(groups[item]) if groups[item] in HEAVY else len(HEAVY))


@pytest.fixture(scope="session")
def _end_ray():
    yield
    import ray

    ray.shutdown()


@pytest.fixture(autouse=True)
def _start_ray(request):
    """For tests marked `ray`, one small Ray, with more CPUs than the machine has, since the environments are tiny."""
    if request.node.get_closest_marker("ray"):
        ray = pytest.importorskip("ray")
        request.getfixturevalue("_end_ray")
        if not ray.is_initialized():
            ray.init(
                address="local",
                num_cpus=4,
                include_dashboard=False,
                object_store_memory=300 << 20,
                logging_level="ERROR",
                log_to_driver=False,
            )


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """The folder of the C++ SDK's compiled examples."""
    return build(tmp_path_factory.mktemp("sdk"), *EXAMPLES, "state_driver")
