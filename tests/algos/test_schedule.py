"""Settings that change over a run."""

import pytest

from corral.algos.schedule import read_schedule
from corral.core.errors import UserError


@pytest.mark.parametrize(
    ("text", "progress", "value"),
    [
        (0.5, 0.7, 0.5),
        ("0.5", 0.7, 0.5),
        ("8:64", 0.0, 8.0),
        ("8:64", 0.5, 36.0),
        ("8 : 64", 1.0, 64.0),
        ("1:0.1@0.5", 0.25, 0.55),
        ("1:0.1@0.5", 0.8, 0.1),
        ("1e-3:0", 0.5, 5e-4),
    ],
)
def test_a_schedule_goes_evenly_from_its_start_to_its_end(text, progress, value):
    assert read_schedule("x", text)(progress) == pytest.approx(value)


def test_maximum_of_a_schedule_is_known():
    assert read_schedule("sims", "8:64").maximum == 64
    assert read_schedule("sims", "64:8").maximum == 64


@pytest.mark.parametrize("text", ["much", "8:", "8:64@", "8:64@0", "8:64@2", ":3"])
def test_invalid_schedule_names_the_setting(text):
    with pytest.raises(UserError, match="sims"):
        read_schedule("sims", text)


@pytest.mark.parametrize("text", [0, "0:8", "8:0"])
def test_bounds_hold_at_both_ends(text):
    with pytest.raises(UserError, match="sims must be at least 1"):
        read_schedule("sims", text, 1)
