"""Fixtures that tests of several folders use."""

import fcntl
import os

import pytest
from helpers.cpp_sdk import build


@pytest.fixture(scope="module")
def ray_session():
    """A small Ray with more CPUs than the machine has, since the environments are tiny."""
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


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """The folder of the C++ SDK's compiled examples and tests: built once, even if several processes run tests."""
    here = tmp_path_factory.getbasetemp()
    folder = (here.parent if "PYTEST_XDIST_WORKER" in os.environ else here) / "sdk"
    folder.mkdir(exist_ok=True)
    with (folder.parent / "sdk.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # bounded, because compiling has a time limit
        if not (folder / "done").exists():
            build(folder)
            (folder / "done").touch()
    return folder
