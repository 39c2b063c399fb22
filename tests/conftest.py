"""Fixtures that tests of several folders use, and in which order and processes tests run."""

import re
import sys

import pytest
from helpers.cpp_sdk import build_examples
from helpers.leftovers import (  # noqa: F401
    no_process_is_left,
    no_process_is_left_at_the_end,
    pytest_runtest_setup,
)

from corral.core.portable import PORTABLE

CPP = ("test_cpp_sdk", "test_cpp_states", "test_link_planning", "test_link_mppi")  # they share one build
HEAVY = ("ray", "cpp", "test_topologies", "test_resume", "test_data_parallel", "test_examples", "test_process_backend")


def group_of(nodeid):
    """Which tests run one after the other in one process: those of a module, those with Ray, those with the C++ SDK."""
    words, stem = re.split("[^a-z]+", nodeid), nodeid.partition(".py")[0].rpartition("/")[2]
    if "ray" in words or "rllib" in words or "TestRay" in nodeid:
        return "ray"
    return "cpp" if stem in CPP else stem


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return group_of(nodeid)

    return Groups(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark what a class leaves to `make test-slow`, and begin with the groups that take longest."""
    for item in items:
        if re.match(getattr(item.cls, "slow_tests", "$"), item.name):
            item.add_marker(pytest.mark.slow)
        skip_without_linux(item)
    groups = {item: group_of(item.nodeid) for item in items}
    items.sort(key=lambda item: HEAVY.index(groups[item]) if groups[item] in HEAVY else len(HEAVY))


def skip_without_linux(item):
    """Skip what needs Linux if other systems are imitated: see helpers/portable.py."""
    hidden = hasattr(sys.modules.get("sitecustomize"), "_Limited")
    marker = item.get_closest_marker("linux")
    if marker is not None and (hidden or (PORTABLE and not marker.kwargs.get("hidden"))):
        item.add_marker(pytest.mark.skip(reason=f"needs Linux: {marker.args[0]}"))


@pytest.fixture(scope="session", autouse=True)
def _own_configuration(tmp_path_factory):
    """The key that proves a run to be the user's own is made in a folder of the tests, and by their child processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        yield


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
    return build_examples(tmp_path_factory.mktemp("sdk"))
