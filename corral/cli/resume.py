"""`corral resume`: continue a run from its last checkpoint."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from corral.cli.options import Callbacks, Number, Quiet, RunDir, Sinks
from corral.cli.train import print_result
from corral.config.overrides import read_value


@dataclass(frozen=True)
class Resume:
    """Continue a run from its last checkpoint, as if it had never stopped."""

    run_dir: RunDir
    steps: Number = None
    """Total environment steps of the run, to extend it."""
    callback: Callbacks = ()
    """Your own corral.Callback. Those of `corral train` are not saved with the run."""
    sink: Sinks = ()
    quiet: Quiet = False

    def run(self) -> int:
        steps = None if self.steps is None else read_value("--steps", self.steps, int)
        if self.quiet:
            logging.getLogger("corral").setLevel(logging.WARNING)
        from corral.runs.train import resume

        result = resume(self.run_dir, steps=steps, callbacks=self.callback, sinks=self.sink, quiet=self.quiet)
        print_result(result)
        return 0
