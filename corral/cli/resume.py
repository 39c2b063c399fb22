"""`corral resume`: continue a run from its last checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Any

from corral.cli.options import Callbacks, Number, Quiet, RunDir, Settings, Sinks, Trust
from corral.cli.train import print_result, refuse_arguments
from corral.config.overrides import read_value, split_items
from corral.core.errors import UserError

_NO_SETTINGS = {
    "run_dir": "DIR", "callback": "--callback", "callbacks": "--callback", "sink": "--sink", "sinks": "--sink",
    "quiet": "--quiet",
}  # fmt: skip
"""Arguments of `corral.resume` that are not settings -> how to write them."""


@dataclass(frozen=True)
class Resume:
    """Continue a run from its last checkpoint, as if it had never stopped, or with changed settings.

    A finished run says so and needs more --steps.
    """

    run_dir: RunDir
    steps: Number = None
    """Total environment steps of the run, to extend it."""
    actors: Number = None
    """Actor processes, in topologies that have actors. All environments start new episodes."""
    set: Settings = ()
    """Settings to change, such as learning_rate=1e-4; not those of the network or the layout of the data."""
    callback: Callbacks = ()
    """Your own corral.Callback. Those of `corral train` are not saved with the run."""
    sink: Sinks = ()
    trust: Trust = False
    quiet: Quiet = False

    def run(self) -> int:
        given: dict[str, Any] = dict(split_items(chain.from_iterable(self.set)))
        refuse_arguments(given, _NO_SETTINGS)
        for name in ("steps", "actors"):
            if (value := getattr(self, name)) is not None:
                if name in given:
                    raise UserError(f"{name} is set twice, by --{name} and by --set.")
                given[name] = read_value(f"--{name}", value, int)
        from corral.runs.load import trust
        from corral.runs.train import resume

        if self.trust:
            trust(self.run_dir)

        result = resume(self.run_dir, callbacks=self.callback, sinks=self.sink, quiet=self.quiet, **given)
        print_result(result)
        return 0
