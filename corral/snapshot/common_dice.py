"""The generators that a process shares, `random` and `numpy.random`: who steps a planner's environment spares them.

An environment that draws from them in its steps cannot be planned on: the planner would throw the dice of the one that
acts, and nothing that is kept of its state says what they will show. That is refused, as soon as it is seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from corral.core.errors import EnvFailed, UserError
from corral.snapshot.rng import read_global_generators, same_state, write_global_generators

_FIRST, _EVERY = 64, 16  # when to look: reading them takes as long as some steps


class CommonDice:
    """Watches over them, at first always and later now and then."""

    def __init__(self, name: str):
        self._name, self._calls = name, 0

    @contextmanager
    def spared(self) -> Iterator[None]:
        """Puts back what steps in between took of them; UserError if they took any."""
        self._calls += 1
        if self._calls > _FIRST and self._calls % _EVERY:
            yield
            return
        failed: Exception | None = None
        with put_back() as taken:
            try:
                yield
            except (EnvFailed, UserError) as error:  # perhaps for that reason
                failed = error
        if taken:
            raise UserError(
                f"{self._name} draws from {taken[0]}, which it shares with everything in this process, so that no "
                "planner can leave it alone: let it draw from self.np_random."
            ) from failed
        if failed is not None:
            raise failed


@contextmanager
def put_back() -> Iterator[list[str]]:
    """Whatever is done, they are then where they were; names of those that were drawn from."""
    taken: list[str] = []
    before = read_global_generators()
    try:
        yield taken
    finally:
        now = read_global_generators()
        for name, public in (("numpy", "numpy.random"), ("random", "random")):
            if not same_state(before[name], now[name]):
                taken.append(public)
        if taken:
            write_global_generators(before)
