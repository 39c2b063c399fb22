"""`corral eval`: evaluate the policy of a run."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Annotated

import tyro

from corral.cli.options import Checkpoint, EnvKwargs, Flag, OptionalCount, RunDir, Trust, parse_env_kwargs
from corral.core.errors import UserError

if TYPE_CHECKING:
    from corral.runs.evaluation.evaluate import Evaluation, OnStep
    from corral.runs.load import LoadedPolicy

_EPISODES = 10
SOLVED = "solved"


@dataclass(frozen=True)
class Eval:
    """Evaluate the policy of a run in episodes with seeds that training does not use.

    The run's own evaluations selected its best checkpoint, so their score is optimistic; by default these episodes are
    others. With the run's seed and number of episodes, this repeats the run's own evaluation.
    """

    run_dir: RunDir
    env: Annotated[str | None, tyro.conf.arg(metavar="ID|MODULE:CLASS|URL", help_behavior_hint="")] = None
    """Another environment with the same spaces. Default: that of the run."""
    env_kwargs: EnvKwargs = ()
    episodes: OptionalCount = None
    """Episodes of each kind. Default: as in the run's own evaluations."""
    seed: OptionalCount = None
    """Seed of the episodes. Default: one that the run did not use."""
    deterministic: Flag = False
    """Evaluate the deterministic policy only. Default: both deterministic and sampled."""
    sampled: Flag = False
    """Evaluate only with sampled actions, as in training."""
    checkpoint: Checkpoint = "best"
    render: Flag = False
    """Show the episodes on the screen, with deterministic actions unless --sampled."""
    search_sims: OptionalCount = None
    """Plan with this many simulations before every action, by saving and restoring the environment."""
    opponent: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = None
    """Opponent in a game: random, mcts:1000, perfect, module:name; solved: count correct moves in solved positions."""
    trust: Trust = False
    json: Flag = False
    """Print JSON, with every episode."""

    def run(self) -> int:
        for name, value, least in (("episodes", self.episodes, 1), ("seed", self.seed, 0)):
            if value is not None and value < least:
                raise UserError(f"--{name} must be at least {least}, got {value}.")
        if self.search_sims is not None and self.search_sims < 1:
            raise UserError(f"--search-sims must be at least 1, got {self.search_sims}: omit it for no search.")
        from corral.runs.evaluation.evaluate import with_env
        from corral.runs.load import load_policy, trust

        if self.trust:
            trust(self.run_dir)
        loaded = load_policy(self.run_dir, self.checkpoint, device="run")
        loaded.use_training_threads()
        env_kwargs = parse_env_kwargs(self.env_kwargs)
        if self.env is not None or env_kwargs:
            loaded.experiment = with_env(loaded.experiment, self.env, env_kwargs)
        if self.opponent == SOLVED:
            self._solve(loaded)
            return 0
        results = self._play(loaded)
        if self.json:
            found = {name: result.to_json() for name, result in results.items()}
            sims = planned_sims(loaded, self.search_sims)
            searched = {} if sims is None else {"search_sims": sims}
            print(json.dumps({"run": str(self.run_dir), "step": loaded.step, **searched, **found}))
        else:
            recorded = self.env is None and not env_kwargs
            _print(loaded, results, self.opponent, self.search_sims, recorded=recorded)
        return 0

    def _solve(self, loaded: LoadedPolicy) -> None:
        from corral.runs.evaluation.evaluate import solved_fraction

        share, count = solved_fraction(loaded, self.search_sims)
        if self.json:
            print(json.dumps({"run": str(self.run_dir), "step": loaded.step, "right": share, "positions": count}))
        else:
            print(f"Correct moves: {share:.1%} of {count:,} solved positions")

    def _play(self, loaded: LoadedPolicy) -> dict[str, Evaluation]:
        from corral.runs.evaluation.evaluate import evaluate_loaded
        from corral.runs.views.video import make_screen

        experiment = loaded.experiment
        if self.opponent is not None:
            changed = experiment.eval_env_kwargs | {"opponent": self.opponent}
            experiment = loaded.experiment = replace(experiment, eval_env_kwargs=changed)
        episodes = self.episodes or experiment.eval_episodes or _EPISODES
        both = self.deterministic == self.sampled and not self.render
        kinds = [True, False] if both else [self.deterministic or not self.sampled]
        screen = make_screen(experiment) if self.render else contextlib.nullcontext()
        with screen as vec, show_progress(f"of {episodes} episodes") as show:
            results = evaluate_loaded(
                loaded, episodes, kinds, vec=vec, seed=self.seed, search_sims=self.search_sims, on_step=show
            )
        return {"deterministic" if kind else "sampled": result for kind, result in zip(kinds, results, strict=True)}


@contextlib.contextmanager
def show_progress(total: str) -> Iterator[OnStep]:
    """While the block runs, a line on a terminal that says how far the evaluation is."""
    from rich.console import Console

    with Console(stderr=True).status("evaluating") as status:
        yield lambda done, steps: status.update(f"evaluating: {done} {total}, {steps:,} steps")


def planned_sims(loaded: LoadedPolicy, asked: int | None) -> int | None:
    """Simulations of a search before every action; None if the network alone selects actions."""
    if asked is not None:
        return asked
    sims = getattr(loaded.as_policy(), "sims", None)
    return None if sims is None else int(sims)


def _print(
    loaded: LoadedPolicy, results: dict[str, Evaluation], opponent: str | None, search_sims: int | None, *,
    recorded: bool,
) -> None:  # fmt: skip
    from rich.table import Table

    from corral.cli.console import make_console, number_format

    experiment, console = loaded.experiment, make_console()
    count = len(next(iter(results.values())).returns)
    console.print(
        f"{experiment.algo} on {experiment.env}, checkpoint of step {loaded.step:,}, "
        f"{count} episode{'s' * (count != 1)} of each kind"
    )
    sims = planned_sims(loaded, search_sims)
    if sims is not None:
        console.print(f"Searched with {sims} simulations before every action")
    table = Table(
        "actions", "mean return", "std", "95 % interval", "min", "max", "length", box=None, padding=(0, 2, 0, 0)
    )
    show = number_format(*chain.from_iterable(result.returns for result in results.values()))
    for name, result in results.items():
        low, high = result.mean - result.half_width, result.mean + result.half_width
        interval = "unknown" if count == 1 else f"{show(low)} to {show(high)}"
        lengths = result.lengths
        table.add_row(
            name, show(result.mean), show(result.std), interval, show(min(result.returns)),
            show(max(result.returns)), f"{sum(lengths) / count:.0f} ({min(lengths)} to {max(lengths)})",
        )  # fmt: skip
    console.print(table)
    against = opponent or experiment.eval_env_kwargs.get("opponent")
    if against is not None:
        for name, result in results.items():
            won, lost = sum(r > 0 for r in result.returns), sum(r < 0 for r in result.returns)
            console.print(f"Against {against}, {name}: {won} won, {count - won - lost} drawn, {lost} lost")
    if loaded.evaluation is not None and opponent is None and recorded:
        count = len(loaded.evaluation["returns"])
        console.print(
            f"Recorded by the run: mean return {show(loaded.evaluation['mean'])} "
            f"over {count} episode{'s' * (count != 1)}, deterministic"
        )
