"""`corral check-env`: check an environment and report what is wrong with it."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from corral.cli.options import Count, EnvKwargs, EnvOrUrl, JsonFile, Seconds, parse_env_kwargs
from corral.core.errors import UserError
from corral.core.log import log_level

_COLOURS = {"pass": "green", "warn": "yellow", "fail": "bold red"}
_LAST_FRAMES = 5


@dataclass(frozen=True)
class CheckEnv:
    """Check that an environment conforms to the Gymnasium API; the exit code is 1 if it does not."""

    env: EnvOrUrl
    env_kwargs: EnvKwargs = ()
    steps: Count = 1000
    """Random steps to take."""
    seed: Count = 0
    """Seed of the environment and of the random actions."""
    json: JsonFile = None
    timeout_s: Seconds = 120.0
    """Seconds that one check may take; after that, show where it hangs and exit."""

    def run(self) -> int:
        from corral.cli.console import make_console, print_row, write_json
        from corral.testing.checks.checker import iter_checks
        from corral.testing.checks.env import FOUNDATIONS

        if self.timeout_s <= 0:
            raise UserError(f"--timeout-s must be positive, got {self.timeout_s:g}.")
        faulthandler.enable()
        console = make_console()
        results = iter_checks(self.env, env_kwargs=parse_env_kwargs(self.env_kwargs), steps=self.steps, seed=self.seed)
        seen = []
        # Faults are shown as results.
        with log_level("corral.envs", logging.ERROR), log_level("corral.planning", logging.ERROR):
            while True:
                with _deadline(self.timeout_s):
                    result = next(results, None)
                if result is None:
                    break
                seen.append(result)
                style = _COLOURS[result.status]
                print_row(console, (result.status, 4, style), (result.name, 14, ""), (result.detail, None, ""))
        statuses = [result.status for result in seen]
        if self.json is not None:
            checks = [{"name": r.name, "status": r.status, "detail": r.detail} for r in seen]
            facts = {"passed": "fail" not in statuses, "checks": checks, "facts": dict(seen[-1].facts)}
            write_json(self.json, {"env": self.env} | facts)
        console.print()
        console.print(_verdict(self.env, statuses, stopped=seen[-1].name in FOUNDATIONS))
        return int("fail" in statuses)


def _verdict(env: str, statuses: Sequence[str], *, stopped: bool) -> str:
    failed, warned = statuses.count("fail"), statuses.count("warn")
    if failed and stopped:
        return f"{env} fails; the remaining checks need this one to pass."
    if failed:
        return f"{env} fails {failed} of {len(statuses)} checks."
    if warned:
        return f"{env} works, with {warned} warning{'s' if warned > 1 else ''}."
    return f"{env} passes all {len(statuses)} checks."


@contextlib.contextmanager
def _deadline(timeout_s: float) -> Iterator[None]:
    """End the process, with the stack that hangs, if the block takes too long."""

    waiting = threading.get_ident()

    def give_up() -> None:
        sys.stdout.flush()
        print(f"corral: the environment has not answered for {timeout_s:g} s; it hangs here:", file=sys.stderr)
        stack = traceback.extract_stack(sys._current_frames()[waiting])
        print("".join(traceback.format_list(stack[-_LAST_FRAMES:])), end="", file=sys.stderr, flush=True)
        os._exit(1)

    timer = threading.Timer(timeout_s, give_up)
    timer.daemon = True
    timer.start()
    # The timer cannot run while the environment holds the GIL; this one can.
    faulthandler.dump_traceback_later(timeout_s + 2.0, exit=True)
    try:
        yield
    finally:
        timer.cancel()
        faulthandler.cancel_dump_traceback_later()
