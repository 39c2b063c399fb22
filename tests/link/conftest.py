"""What several of these tests share."""

import fcntl
import os

import pytest
from cpp_sdk import build


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """Where the C++ SDK's examples and tests are: built once, though several processes may test."""
    here = tmp_path_factory.getbasetemp()
    folder = (here.parent if "PYTEST_XDIST_WORKER" in os.environ else here) / "sdk"
    folder.mkdir(exist_ok=True)
    with (folder.parent / "sdk.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # compiling has a time limit, so this has
        if not (folder / "done").exists():
            build(folder)
            (folder / "done").touch()
    return folder
