"""`corral state-server`: store simulators' states for many clients, in memory or in a folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from corral.cli.options import Flag
from corral.config.overrides import read_value
from corral.core.errors import UserError


@dataclass(frozen=True)
class StateServerCommand:
    """Store exported states by name, within a budget, until you stop it; with --dir they survive a restart."""

    bind: Annotated[str, tyro.conf.arg(metavar="URL")] = "tcp://127.0.0.1:5560"
    """Where to listen."""
    dir: Annotated[Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="")] = None
    """Folder for the states. Default: in memory, lost when the server stops."""
    max_mb: Annotated[str, tyro.conf.arg(metavar="N")] = "1024"
    """Maximum size of all states, in MB."""
    max_states: Annotated[str, tyro.conf.arg(metavar="N")] = "100000"
    """Maximum number of states."""
    token_file: Annotated[str | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """Clients must know the token in this file."""
    insecure: Flag = False
    """Listen for other machines without a token."""

    def run(self) -> int:
        max_mb, max_states = read_value("--max-mb", self.max_mb, int), read_value("--max-states", self.max_states, int)
        for name, value in (("--max-mb", max_mb), ("--max-states", max_states)):
            if value < 1:
                raise UserError(f"{name} must be at least 1, got {value}.")
        from corral.link.address import parse_url, require_safe
        from corral.link.auth import read_token
        from corral.link.transports.open import open_binding
        from corral.snapshot.store.base import MemoryStates, StateBudget
        from corral.snapshot.store.files import FileStates
        from corral.snapshot.store.server import StateServer

        address, token = parse_url(self.bind), read_token(self.token_file)
        require_safe(address, token, self.insecure)
        budget = StateBudget(max_mb << 20, max_states)
        keeper = MemoryStates(budget) if self.dir is None else FileStates(self.dir, budget)
        server = StateServer(open_binding(address.scheme, listen=address), keeper, token)
        print(f"State server at {', '.join(server.urls)}; {len(keeper.names())} states.", flush=True)
        try:
            while True:
                server.poll(0.25)
        finally:
            server.close()
