"""Benchmarks start many processes; none may be left."""

from helpers.leftovers import no_process_is_left, pytest_runtest_setup  # noqa: F401
