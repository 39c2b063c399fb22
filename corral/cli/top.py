"""`corral top`: the state of a run, refreshed every second."""

from __future__ import annotations

import contextlib
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from corral.cli.options import Flag, RunDir

if TYPE_CHECKING:
    from rich.table import Table

    from corral.runs.views.top import View

_REFRESH_S = 1.0
_NAME_WIDTH = 10
_STYLES = {"running": "green", "finished": "blue", "stopped": "yellow", "failed": "bold red", "killed": "bold red"}


@dataclass(frozen=True)
class Top:
    """Show what a run is doing, refreshed every second until it ends; Ctrl-C stops the display, not the run."""

    run_dir: RunDir
    once: Flag = False
    """Print once and exit (the default when output is not a terminal)."""

    def run(self) -> int:
        from rich.live import Live

        from corral.cli.console import make_console, print_row
        from corral.runs.folder import RunFolder
        from corral.runs.views.top import look

        view, console = look(RunFolder.open(self.run_dir)), make_console()
        if self.once or not sys.stdout.isatty():
            for name, text in view.lines:
                print_row(console, (name, _NAME_WIDTH, "bold"), (text, None, _style(view, name)))
            return 0
        with contextlib.suppress(KeyboardInterrupt), Live(_table(view), console=console, auto_refresh=False) as live:
            while view.state in ("running", "not started"):
                time.sleep(_REFRESH_S)
                view = look(RunFolder.open(self.run_dir))
                live.update(_table(view), refresh=True)
        return 0


def _table(view: View) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", width=_NAME_WIDTH)
    table.add_column(overflow="fold")
    for name, text in view.lines:
        table.add_row(name, Text(text, _style(view, name)))
    return table


def _style(view: View, name: str) -> str:
    return _STYLES.get(view.state, "") if name == "status" else ""
