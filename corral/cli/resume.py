"""`corral resume`: continue a run from its last checkpoint."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from corral.cli.train import Flag, Number, Plugins, Sinks, print_result
from corral.config.overrides import read_value


@dataclass(frozen=True)
class Resume:
    """Continue a run from its last checkpoint, as if it had never stopped."""

    run_dir: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DIR")]
    """The run."""
    steps: Number = None
    """Environment steps of the whole run, to make it longer than planned."""
    callback: Plugins = ()
    """A corral.Callback of your own; may be repeated. Those of `corral train` are not saved with the run."""
    sink: Sinks = ()
    """A corral.MetricSink of your own; or csv, tensorboard, to choose among these. May be repeated."""
    quiet: Flag = False
    """Show no progress, only the result."""

    def run(self) -> int:
        steps = None if self.steps is None else read_value("--steps", self.steps, int)
        if self.quiet:
            logging.getLogger("corral").setLevel(logging.WARNING)
        from corral.runs.train import resume

        result = resume(self.run_dir, steps=steps, callbacks=self.callback, sinks=self.sink, quiet=self.quiet)
        print_result(result)
        return 0
