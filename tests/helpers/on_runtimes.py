"""Cases that are to work on every runtime or backend."""

import itertools

import pytest

RUNTIMES = ("inline", "process", "ray")
RAY_BACKEND = [pytest.mark.ray, pytest.mark.linux("backend='ray'", hidden=True)]


def on_runtimes(cases, quick):
    """Parameters (case, runtime): `make test` takes all inline and those of `quick`, `make test-slow` the rest."""
    params = []
    for case, runtime in itertools.product(cases, RUNTIMES):
        marks = [pytest.mark.ray] if runtime == "ray" else []
        if runtime != "inline" and (case, runtime) not in quick:
            marks.append(pytest.mark.slow)
        params.append(pytest.param(case, runtime, marks=marks, id=f"{case}-{runtime}"))
    return params
