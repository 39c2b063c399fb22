"""`python -m benchmarks sampling`: environment steps per second, compared with other libraries in one run."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from benchmarks.common.command import require_at_least_one, require_interleaved, run_cases
from benchmarks.sampling.cases import CaseName, make_cases


@dataclass(frozen=True)
class BenchSampling:
    """Measure environment steps per second, compared with other libraries in interleaved rounds.

    Prints tables, and writes sampling.png and sampling.json. A library that is not installed is skipped.
    """

    case: Literal["all", "cartpole", "pong", "slow"] = "all"
    """cartpole: cheap steps; pong: images; slow: steps that wait."""
    num_envs: int | None = None
    """Number of environments. Default: CartPole 64 and 8, Pong 8 and 32, slow 16."""
    rounds: int = 5
    """Number of rounds; every contestant runs in each."""
    seconds: float = 1.0
    """Seconds per contestant and round."""
    out: Path = Path("bench")
    """Folder for the PNG and the JSON."""

    def run(self) -> int:
        require_at_least_one(num_envs=self.num_envs)
        require_interleaved(self)
        names: list[CaseName] = ["cartpole", "pong", "slow"] if self.case == "all" else [self.case]
        return run_cases("sampling", asdict(self) | {"out": str(self.out)}, self, make_cases(names, self.num_envs))
