"""`corral serve`: serve a Gymnasium environment over the link."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from corral.cli.options import EnvKwargs, Flag, parse_env_kwargs
from corral.config.overrides import read_value
from corral.core.errors import UserError

_Url = Annotated[str | None, tyro.conf.arg(metavar="URL", help_behavior_hint="")]


@dataclass(frozen=True)
class Serve:
    """Serve an environment to learners until their run ends (--connect) or you stop it (--bind).

    A process that crashes or hangs is restarted.
    """

    env: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="ENV")]
    """Gymnasium id, or your own module:Class."""
    bind: _Url = None
    """Address to listen on, such as tcp://127.0.0.1:5555."""
    connect: _Url = None
    """Address of the learner to connect to, instead of --bind."""
    env_kwargs: EnvKwargs = ()
    envs: Annotated[str, tyro.conf.arg(metavar="N")] = "64"
    """Maximum number of environments in each process; they are built on first use."""
    workers: Annotated[str, tyro.conf.arg(metavar="N")] = "1"
    """Number of processes, each its own simulator; more than one needs --connect."""
    token_file: Annotated[str | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """File with the shared token that both sides must have."""
    insecure: Flag = False
    """Listen for other machines without a token."""
    patience: Annotated[str, tyro.conf.arg(metavar="SECONDS")] = "0"
    """Exit after this many seconds without a learner; 0: never."""

    def run(self) -> int:
        if (self.bind is None) == (self.connect is None):
            raise UserError("Give either --bind, such as tcp://127.0.0.1:5555, or --connect URL of the learner.")
        envs, workers = read_value("--envs", self.envs, int), read_value("--workers", self.workers, int)
        patience = read_value("--patience", self.patience, float)
        for name, value, least in (("--envs", envs, 1), ("--workers", workers, 1), ("--patience", patience, 0)):
            if not value >= least:
                raise UserError(f"{name} must be at least {least}, got {value}.")
        if workers > 1 and self.bind is not None:
            raise UserError("Several processes cannot listen at one address: use --connect with --workers.")
        from corral.envs.serve.supervisor import ServeJob, supervise
        from corral.link.address import parse_url
        from corral.link.auth import read_token

        url = self.bind or self.connect or ""
        parse_url(url)
        read_token(self.token_file)
        job = ServeJob(
            self.env, dict(parse_env_kwargs(self.env_kwargs)), url, self.bind is not None, envs, self.token_file,
            self.insecure, patience,
        )  # fmt: skip
        return supervise([job] * workers)
