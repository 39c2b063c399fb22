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
    """Total environment steps of the run, to extend it."""
    callback: Plugins = ()
    """Your own corral.Callback. Those of `corral train` are not saved with the run."""
    sink: Sinks = ()
    """Your own corral.MetricSink, or csv or tensorboard to choose among the built-in ones."""
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
