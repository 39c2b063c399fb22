"""`corral resume`: go on with a run from its last checkpoint."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from corral.cli.train import Flag, Number, print_result
from corral.config.overrides import read_value


@dataclass(frozen=True)
class Resume:
    """Go on with a run from its last checkpoint, as if it had never stopped."""

    run_dir: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DIR")]
    """The run."""
    steps: Number = None
    """Environment steps of the whole run, when it is to be longer than planned."""
    quiet: Flag = False
    """Show no progress, only the result."""

    def run(self) -> int:
        """Train on, and print where the run is, how good it got, and what to do next."""
        steps = None if self.steps is None else read_value("--steps", self.steps, int)
        if self.quiet:
            logging.getLogger("corral").setLevel(logging.WARNING)
        from corral.runs.train import resume

        print_result(resume(self.run_dir, steps=steps, quiet=self.quiet))
        return 0
