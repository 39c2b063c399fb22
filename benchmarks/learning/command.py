"""`python -m benchmarks learning`: train every claim of the learning table, and write the table."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from benchmarks.common.command import given_options, progress, require_at_least_one
from benchmarks.common.facts import facts
from benchmarks.learning.claims import CLAIMS, Table
from benchmarks.learning.table import section, write_section
from benchmarks.learning.trials import examine
from corral.core.errors import UserError


@dataclass(frozen=True)
class BenchLearning:
    """Train every claim of a learning table with several seeds, and write the table into BENCHMARKS.md.

    The exit code is 1 if a claim does not hold. Takes about half an hour, with --table planning two hours.
    """

    table: Table = "learning"
    """The table: all algorithms, several learners, C++ simulators, learning with search, or images in bf16."""
    only: Annotated[str | None, tyro.conf.arg(metavar="TEXT", help_behavior_hint="")] = None
    """Only claims whose name, such as "ppo CartPole-v1", contains this text; the file is then not written."""
    seeds: int = 3
    """Number of seeds per claim, starting at 1."""
    jobs: int = 1
    """Number of concurrent runs; more finish sooner, but each takes longer."""
    out: Path = Path("BENCHMARKS.md")
    """File that contains the table."""

    def run(self) -> int:
        require_at_least_one(seeds=self.seeds, jobs=self.jobs)
        every = [claim for claim in CLAIMS if claim.table == self.table]
        claims = [claim for claim in every if (self.only or "").lower() in claim.name.lower()]
        if not claims:
            raise UserError(f"No claim contains {self.only!r}: choose from {', '.join(c.name for c in every)}.")
        with progress() as say, tempfile.TemporaryDirectory(prefix="corral-learning-") as folder:
            findings = examine(claims, range(1, self.seeds + 1), Path(folder), self.jobs, say)
        options = given_options(self, "table", "only", "seeds", "jobs")
        lines = section(findings, facts(), f"python -m benchmarks learning{options}", self.jobs)
        print("\n".join(lines))
        if self.only is None:
            write_section(self.out, lines, self.table)
            print(f"Wrote {self.out}.")
        missed = [finding.claim.name for finding in findings if not finding.held]
        if missed:
            print(f"Not met by every seed: {', '.join(missed)}.")
        return 1 if missed else 0
