"""What several of these tests share."""

import pytest
from cpp_sdk import build


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """Where the C++ SDK's examples and tests are."""
    return build(tmp_path_factory.mktemp("sdk"))
