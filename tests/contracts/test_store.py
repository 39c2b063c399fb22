"""Every store through the public contract suites."""

import pytest

from corral.core.errors import UserError
from corral.core.types import DataSpec
from corral.data.make import make_store
from corral.testing.contracts.store import FifoContract, ReplayContract, counting_spec


class TestSequences(FifoContract):
    data = DataSpec("sequence", 5, 3, "once")
    fragment_length = 5


class TestSequencesInOddBatches(FifoContract):
    data = DataSpec("sequence", 3, 7, "once")
    fragment_length = 3


class TestSequencesOfSomeColumns(FifoContract):
    data = DataSpec("sequence", 6, 2, "once")
    fragment_length = 6


class TestEpisodes(FifoContract):
    data = DataSpec("episode", 1, 4, "once")
    fragment_length = 3


class TestEpisodesShorterThanFragments(FifoContract):
    data = DataSpec("episode", 1, 3, "once")
    fragment_length = 11


class TestUniform(ReplayContract):
    data = DataSpec("transition", 1, 16, "replay", capacity=400, gamma=0.9)
    fragment_length = 4


class TestUniformThatForgets(ReplayContract):
    data = DataSpec("transition", 1, 16, "replay", capacity=37, min_size=20, gamma=0.9)
    fragment_length = 4


class TestNStep(ReplayContract):
    data = DataSpec("transition", 3, 16, "replay", capacity=401, gamma=0.9)
    fragment_length = 2


class TestNStepLongerThanEpisodes(ReplayContract):
    data = DataSpec("transition", 6, 8, "replay", capacity=400, gamma=0.5)
    fragment_length = 7


class TestPrioritised(ReplayContract):
    data = DataSpec("transition", 1, 16, "replay", capacity=400, gamma=0.9, prioritised=True)
    fragment_length = 4


class TestPrioritisedNStepThatForgets(ReplayContract):
    data = DataSpec("transition", 3, 16, "replay", capacity=53, gamma=0.9, prioritised=True)
    fragment_length = 1


@pytest.mark.parametrize(("unit", "reuse"), [("transition", "once"), ("sequence", "replay")])
def test_invalid_data_spec_is_refused(unit, reuse):
    with pytest.raises(UserError, match="no store"):
        make_store(counting_spec(), DataSpec(unit, 1, 4, reuse, capacity=10), 2)
