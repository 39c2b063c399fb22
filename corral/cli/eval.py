"""`corral eval`: how good a run's agent is, or what it looks like."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from corral.cli.train import Flag
from corral.core.errors import UserError

if TYPE_CHECKING:
    from corral.runs.evaluate import Evaluation
    from corral.runs.load import LoadedPolicy

_EPISODES = 10
SOLVED = "solved"


@dataclass(frozen=True)
class Eval:
    """Let a run's agent play games that it was not trained on, and say how well it does.

    With the run's own seed and number of episodes, it repeats what the run has recorded.
    """

    run_dir: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DIR")]
    """The run."""
    episodes: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None
    """Games of each kind; by default as many as the run's own evaluations have."""
    seed: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None
    """Of the games; by default the run's."""
    deterministic: Flag = False
    """Only with the best actions; without either, both."""
    sampled: Flag = False
    """Only with actions drawn at random, as in training."""
    checkpoint: Annotated[str, tyro.conf.arg(metavar="NAME")] = "best"
    """best, latest, or the name of one."""
    render: Flag = False
    """Show the games on the screen; the best actions, unless --sampled."""
    search_sims: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None
    """Look ahead with so many simulations before every action, by saving and restoring the environment."""
    opponent: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = None
    """Of Corral's games, who plays against the agent: random, mcts:1000, perfect, module:name; or solved, which counts
    right moves in positions of Connect Four whose best moves are known."""
    json: Flag = False
    """Print JSON, with every episode."""

    def run(self) -> int:
        """Play, and print a table."""
        for name, value, least in (("episodes", self.episodes, 1), ("seed", self.seed, 0)):
            if value is not None and value < least:
                raise UserError(f"--{name} must be at least {least}, got {value}.")
        if self.search_sims is not None and self.search_sims < 1:
            raise UserError(f"--search-sims must be at least 1, got {self.search_sims}: leave it out to play without.")
        from corral.runs.load import load_policy

        loaded = load_policy(self.run_dir, self.checkpoint, device="run")
        loaded.use_training_threads()
        if self.opponent == SOLVED:
            self._solve(loaded)
            return 0
        results = self._play(loaded)
        if self.json:
            found = {name: result.to_json() for name, result in results.items()}
            print(json.dumps({"run": str(self.run_dir), "step": loaded.step, **found}))
        else:
            _print(loaded, results, self.opponent)
        return 0

    def _solve(self, loaded: LoadedPolicy) -> None:
        from corral.runs.evaluate import share_solved

        share, count = share_solved(loaded, self.search_sims)
        if self.json:
            print(json.dumps({"run": str(self.run_dir), "step": loaded.step, "right": share, "positions": count}))
        else:
            print(f"Right moves: {share:.1%} of {count:,} solved positions")

    def _play(self, loaded: LoadedPolicy) -> dict[str, Evaluation]:
        from corral.acting.policy import PlanningPolicy
        from corral.runs.evaluate import acting_seed, evaluate, make_eval_vec
        from corral.runs.folder import require_same_env
        from corral.runs.views.video import make_screen

        experiment = loaded.experiment
        if self.opponent is not None:
            changed = experiment.eval_env_kwargs | {"opponent": self.opponent}
            experiment = replace(experiment, eval_env_kwargs=changed)
        episodes = self.episodes or experiment.eval_episodes or _EPISODES
        seed = experiment.seed if self.seed is None else self.seed
        both = self.deterministic == self.sampled and not self.render
        kinds = [True, False] if both else [self.deterministic or not self.sampled]
        here = self.search_sims is not None or isinstance(loaded.as_policy(), PlanningPolicy)
        with make_screen(experiment) if self.render else make_eval_vec(experiment, episodes, seed, here=here) as vec:
            require_same_env(vec.spec, loaded.spec)
            results = {}
            for greedy in kinds:
                drawn = acting_seed(seed, deterministic=greedy)
                if self.search_sims is None:
                    policy = loaded.as_policy(deterministic=greedy, seed=drawn)
                else:
                    policy = loaded.search_policy(self.search_sims, deterministic=greedy, seed=drawn)
                results["deterministic" if greedy else "sampled"] = evaluate(vec, policy, episodes, seed)
        return results


def _print(loaded: LoadedPolicy, results: dict[str, Evaluation], opponent: str | None) -> None:
    from rich.table import Table

    from corral.cli.console import make_console

    experiment, console = loaded.experiment, make_console()
    count = len(next(iter(results.values())).returns)
    console.print(
        f"{experiment.algo} on {experiment.env}, checkpoint of step {loaded.step:,}, {count} episodes of each kind"
    )
    table = Table(
        "actions", "mean return", "std", "95 % interval", "min", "max", "length", box=None, padding=(0, 2, 0, 0)
    )
    for name, result in results.items():
        low, high = result.mean - result.half_width, result.mean + result.half_width
        interval = "unknown" if count == 1 else f"{low:.1f} to {high:.1f}"
        lengths = result.lengths
        table.add_row(
            name, f"{result.mean:.1f}", f"{result.std:.1f}", interval, f"{min(result.returns):.1f}",
            f"{max(result.returns):.1f}", f"{sum(lengths) / count:.0f} ({min(lengths)} to {max(lengths)})",
        )  # fmt: skip
    console.print(table)
    against = opponent or experiment.eval_env_kwargs.get("opponent")
    if against is not None:
        for name, result in results.items():
            won, lost = sum(r > 0 for r in result.returns), sum(r < 0 for r in result.returns)
            console.print(f"Against {against}, {name}: {won} won, {count - won - lost} drawn, {lost} lost")
    if loaded.evaluation is not None and opponent is None:
        console.print(
            f"Recorded by the run: mean return {loaded.evaluation['mean']:.1f} "
            f"over {len(loaded.evaluation['returns'])} episodes, deterministic"
        )
