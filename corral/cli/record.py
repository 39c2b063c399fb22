"""`corral record`: a video of the policy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from corral.cli.options import Checkpoint, Count, Flag, OptionalCount, OptionalReal, RunDir, Seconds, Trust


@dataclass(frozen=True)
class Record:
    """Record a video of the policy of a run as MP4 or GIF; no display is needed."""

    run_dir: RunDir
    out: Annotated[Path, tyro.conf.arg(aliases=["-o"], metavar="FILE")] = Path("video.mp4")
    """File to write, .mp4 or .gif."""
    episodes: Count = 1
    """Episodes to record."""
    seconds: Seconds = 120.0
    """Maximum length of the video."""
    fps: OptionalReal = None
    """Frames per second. Default: that of the environment."""
    sampled: Flag = False
    """Sample actions, as in training. Default: deterministic actions."""
    seed: OptionalCount = None
    """Seed of the episodes. Default: the run's, whose evaluation plays the same first episode."""
    checkpoint: Checkpoint = "best"
    trust: Trust = False

    def run(self) -> int:
        from corral.runs.load import trust
        from corral.runs.views.video import record_run

        if self.trust:
            trust(self.run_dir)

        video = record_run(
            self.run_dir, self.out, episodes=self.episodes, seconds=self.seconds, fps=self.fps,
            deterministic=not self.sampled, seed=self.seed, checkpoint=self.checkpoint,
        )  # fmt: skip
        returns = ", ".join(f"{value:g}" for value in video.returns)
        score = f"return {returns}" if returns else "no episode finished"
        cut = "" if len(video.returns) == self.episodes else f"; stopped at --seconds {self.seconds:g}"
        print(f"Wrote {video.path}: {video.frames:,} frames, {video.seconds:.1f} s at {video.fps:g} fps, {score}{cut}")
        return 0
