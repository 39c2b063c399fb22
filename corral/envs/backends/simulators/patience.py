"""How long to wait for simulators: at the start, and for environments that lost theirs."""

from __future__ import annotations

import logging
import time

from corral.core.errors import EnvFailed
from corral.link.client.fleet import Fleet

log = logging.getLogger("corral.link")

_POLL_S = 0.25
_SAY_S = 5.0  # what waits for longer is worth a word


class Patience:
    """Waits for simulators for so long, says so once, and then gives up with EnvFailed."""

    def __init__(self, fleet: Fleet, most_s: float):
        self._fleet, self._most_s = fleet, most_s
        self._since: float | None = None
        self._said = False

    def gather(self, wanted: int) -> None:
        """Wait for the simulators to begin with."""
        while (there := len(self._fleet.sessions)) < wanted:
            self._wait(f"{there} of {wanted} simulators at {self._where}")
            self._fleet.poll(_POLL_S)
        self._since = None

    def check(self, homeless: int) -> None:
        """Say that so many environments wait for a simulator, if any do."""
        if homeless:
            self._wait(f"{homeless} environments have no simulator at {self._where}")
        else:
            self._since = None

    @property
    def _where(self) -> str:
        return ", ".join(self._fleet.binding.urls)

    def _wait(self, words: str) -> None:
        now = time.monotonic()
        if self._since is None:
            self._since, self._said = now, False
        waited = now - self._since
        if waited > self._most_s:
            raise EnvFailed(f"{words} after {waited:.0f} s; start them, or raise Supervision.start_timeout_s.")
        if waited > _SAY_S and not self._said:
            self._said = True
            log.warning("%s; waiting for more, for up to %.0f s.", words, self._most_s - waited)
