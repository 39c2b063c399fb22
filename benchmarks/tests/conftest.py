"""Benchmarks start many processes; none may be left."""

from helpers.leftovers import (  # noqa: F401
    no_process_is_left,
    no_process_is_left_at_the_end,
    pytest_runtest_setup,
)
