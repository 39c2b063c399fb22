"""`corral record`: a video of the agent."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from corral.cli.train import Flag
from corral.core.errors import UserError


@dataclass(frozen=True)
class Record:
    """Film a run's agent as it plays, without a screen."""

    run_dir: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DIR")]
    """The run."""
    out: Annotated[Path, tyro.conf.arg(aliases=["-o"], metavar="FILE")] = Path("video.mp4")
    """MP4 to write."""
    episodes: Annotated[int, tyro.conf.arg(metavar="N")] = 1
    """Games to film."""
    seconds: Annotated[float, tyro.conf.arg(metavar="S")] = 120.0
    """Longest that the video may be."""
    fps: Annotated[float | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None
    """Frames per second; by default as the environment says."""
    sampled: Flag = False
    """Draw actions at random, as in training, instead of taking the best."""
    seed: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None
    """Of the games; by default the run's, whose evaluation plays the same first game."""
    checkpoint: Annotated[str, tyro.conf.arg(metavar="NAME")] = "best"
    """best, latest, or the name of one."""

    def run(self) -> int:
        """Film, and say what is to be seen."""
        self._check()
        from corral.runs.evaluate import acting_seed
        from corral.runs.load import load_policy
        from corral.runs.views.video import record

        loaded = load_policy(self.run_dir, self.checkpoint, device="run")
        seed = loaded.experiment.seed if self.seed is None else self.seed
        policy = loaded.as_policy(
            deterministic=not self.sampled, seed=acting_seed(seed, deterministic=not self.sampled)
        )
        film = record(
            loaded.experiment, policy, self.out, episodes=self.episodes, seconds=self.seconds, fps=self.fps, seed=seed,
            spec=loaded.spec,
        )  # fmt: skip
        cut = "" if len(film.returns) == self.episodes else f", cut after {self.seconds:g} s (--seconds)"
        returns = ", ".join(f"{value:g}" for value in film.returns)
        print(
            f"Wrote {film.path}: {film.frames:,} frames, {film.seconds:.1f} s at {film.fps:g} fps, "
            f"return {returns or 'of no whole game'}{cut}"
        )
        return 0

    def _check(self) -> None:
        if self.out.suffix.lower() != ".mp4":
            raise UserError(f"--out must end in .mp4, got {self.out}.")
        for name, value in (("episodes", self.episodes), ("seconds", self.seconds), ("fps", self.fps)):
            if value is not None and not value > 0:
                raise UserError(f"--{name} must be above 0, got {value:g}.")
        if self.seed is not None and self.seed < 0:
            raise UserError(f"--seed must be at least 0, got {self.seed}.")
