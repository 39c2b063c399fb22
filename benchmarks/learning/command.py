"""`python -m benchmarks learning`: train every claim of the learning table, and write the table."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from benchmarks.common.command import progress, require_at_least_one
from benchmarks.common.facts import facts
from benchmarks.learning.claims import CLAIMS
from benchmarks.learning.table import section, write_section
from benchmarks.learning.trials import examine
from corral.core.errors import UserError


@dataclass(frozen=True)
class BenchLearning:
    """Train every claim of the learning table over several seeds, and write the table into BENCHMARKS.md.

    Exit code 1 when a claim does not hold. This takes about half an hour, with --table planning two hours.
    """

    table: Literal["learning", "sharing", "simulators", "planning"] = "learning"
    """All algorithms, learners that share, simulators in C++, or learning with search."""
    only: Annotated[str | None, tyro.conf.arg(metavar="TEXT", help_behavior_hint="")] = None
    """Claims whose name, such as "ppo CartPole-v1", has this in it; the file is then left as it is."""
    seeds: int = 3
    """Seeds of every claim, from 1 on."""
    jobs: int = 1
    """Runs side by side; more of them are sooner done, and their wall times longer."""
    out: Path = Path("BENCHMARKS.md")
    """File with the table."""

    def run(self) -> int:
        """Train, print the table, and write it."""
        require_at_least_one(seeds=self.seeds, jobs=self.jobs)
        every = [claim for claim in CLAIMS if claim.table == self.table]
        claims = [claim for claim in every if (self.only or "").lower() in claim.name.lower()]
        if not claims:
            raise UserError(f"No claim has {self.only!r} in its name; there are {', '.join(c.name for c in every)}.")
        with progress() as say, tempfile.TemporaryDirectory(prefix="corral-learning-") as folder:
            findings = examine(claims, range(1, self.seeds + 1), Path(folder), self.jobs, say)
        options = "".join(f" --{name} {value}" for name, value in self._given())
        lines = section(findings, facts(), f"python -m benchmarks learning{options}", self.jobs)
        print("\n".join(lines))
        if self.only is None:
            write_section(self.out, lines, self.table)
            print(f"Wrote {self.out}.")
        missed = [finding.claim.name for finding in findings if not finding.held]
        if missed:
            print(f"NOT reached by every seed: {', '.join(missed)}.")
        return 1 if missed else 0

    def _given(self) -> list[tuple[str, object]]:
        given = {"table": self.table, "only": self.only, "seeds": self.seeds, "jobs": self.jobs}
        return [(name, value) for name, value in given.items() if value != getattr(type(self), name)]
