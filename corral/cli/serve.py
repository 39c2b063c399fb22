"""`corral serve`: put a Gymnasium environment on the link."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from corral.cli.options import EnvKwargs, parse_env_kwargs
from corral.cli.train import Flag, Number
from corral.config.overrides import read_value
from corral.core.errors import EnvFailed, UserError

_Url = Annotated[str | None, tyro.conf.arg(metavar="URL", help_behavior_hint="")]


@dataclass(frozen=True)
class Serve:
    """Serve an environment to learners that name it by URL, until they are done (--connect) or you are (--bind)."""

    env: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="ENV")]
    """Gymnasium id, or module:Class of your own."""
    bind: _Url = None
    """Where to listen, such as tcp://127.0.0.1:5555."""
    connect: _Url = None
    """Which learner to dial instead."""
    env_kwargs: EnvKwargs = ()
    """Keyword arguments for the environment."""
    envs: Number = "64"
    """Most environments at once, for each learner; they are built when they are used."""
    token_file: Annotated[str | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """Learners must know the token in this file."""
    insecure: Flag = False
    """Listen for other machines without a token."""
    patience: Annotated[str, tyro.conf.arg(metavar="S")] = "0"
    """Give up when no learner has been there for so many seconds; 0: never."""

    def run(self) -> int:
        """Serve."""
        if (self.bind is None) == (self.connect is None):
            raise UserError("Say where to listen, --bind tcp://127.0.0.1:5555, or whom to dial, --connect URL.")
        envs, patience = read_value("--envs", self.envs, int), read_value("--patience", self.patience, float)
        for name, value, least in (("--envs", envs, 1), ("--patience", patience, 0)):
            if not value >= least:
                raise UserError(f"{name} must be at least {least}, got {value}.")
        from corral.envs.resolve import resolve
        from corral.envs.serve.server import SimulatorServer
        from corral.link.address import parse_url
        from corral.link.auth import read_token
        from corral.link.transports.open import open_for_simulator

        resolved, token = resolve(self.env, parse_env_kwargs(self.env_kwargs)), read_token(self.token_file)
        address = parse_url(self.bind or self.connect or "")
        while True:
            binding = open_for_simulator(address, token, bind=self.bind is not None, insecure=self.insecure)
            try:
                server = SimulatorServer(resolved.factory, resolved.name, binding, envs, token)
            except Exception as error:
                binding.close()
                if isinstance(error, UserError):
                    raise
                raise EnvFailed(
                    f"{self.env} cannot be served, for it raised {error!r} when it was made or first reset; "
                    f"`corral check-env {self.env}` shows where."
                ) from error
            try:
                code = server.run(patience)
            finally:
                server.close()
            if self.bind is None:
                return code
            # Told to listen, it had dialled a learner that was there first; that one is done, so now it can.
