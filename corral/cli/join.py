"""`corral join`: let this machine step environments for a learner elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from corral.cli.train import Number
from corral.config.overrides import read_value
from corral.core.errors import UserError


@dataclass(frozen=True)
class Join:
    """Step environments for a learner that listens (backend=grpc) until its run is over.

    It says which environments to build, so join only a learner that you trust.
    """

    address: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="HOST:PORT")]
    """Where the learner listens."""
    workers: Number = "1"
    """Worker processes; each takes one of the learner's places."""
    patience: Annotated[str, tyro.conf.arg(metavar="S")] = "120"
    """Seconds to go on trying while no learner answers."""

    def run(self) -> int:
        """Work until there is nothing more to do."""
        workers, patience = read_value("--workers", self.workers, int), read_value("--patience", self.patience, float)
        for name, value, least in (("--workers", workers, 1), ("--patience", patience, 0)):
            if not value >= least:
                raise UserError(f"{name} must be at least {least}, got {value}.")
        from corral.envs.grpc_crew import join

        return join(self.address, workers, patience)
