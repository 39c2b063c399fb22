"""`corral train`: train an agent, and print where the run is and what to do next."""

from __future__ import annotations

import math
import shlex
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from corral.algos.registry import ALGORITHMS
from corral.cli.console import number_format
from corral.cli.options import Callbacks, EnvKwargs, Flag, Number, Quiet, Settings, Sinks, parse_env_kwargs
from corral.config.overrides import read_value, split_items
from corral.core.errors import UserError

if TYPE_CHECKING:
    from corral.runs.training_loop import Result

_OPTIONS = ("env", "init", "preset", "steps", "seed", "num_envs", "topology", "runtime", "actors", "learners")
"""Settings that have their own option; they may also be given by --set."""
_EXAMPLE = "ppo"  # whose settings `corral train --help` shows
_MAX_WIDTH = 100
_NO_SETTINGS = {
    "algo": "ALGO", "config_file": "--config", "callbacks": "--callback", "sinks": "--sink",
    **{name: f"--{name.replace('_', '-')}" for name in
       ("run_dir", "overwrite", "config", "callback", "sink", "quiet", "sim", "sims", "set")},
}  # fmt: skip
"""Arguments of `corral.train`, and options, that are not settings -> how to write them."""


@dataclass(frozen=True)
class Train:
    """Train an agent. Settings come from the defaults, the preset, --config, and the command line; the last wins."""

    algo: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="ALGO")]
    """Algorithm; `corral list algos` shows them, `corral train ALGO --help` its settings."""
    env: Annotated[str | None, tyro.conf.arg(metavar="ID", help_behavior_hint="")] = None
    """Gymnasium id, your own module:Class, or the URL of external simulators, such as tcp://127.0.0.1:5555."""
    env_kwargs: EnvKwargs = ()
    sim: Annotated[str | None, tyro.conf.arg(metavar="COMMAND", help_behavior_hint="")] = None
    """Command that starts an external simulator, with {url} in place of the address to connect to."""
    sims: Number = None
    """Number of simulators to start. Default: 1."""
    steps: Number = None
    """Environment steps. Default: the preset's, or 100,000."""
    seed: Number = None
    """Seed of all random numbers. Default: 0."""
    run_dir: Annotated[Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="")] = None
    """Run directory. Default: runs/ALGO-ENV-SEED-N."""
    overwrite: Flag = False
    """Replace an existing run in --run-dir."""
    num_envs: Number = None
    """Parallel environments, over all actors. Default: that of the preset or algorithm."""
    topology: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = None
    """How acting and learning are distributed: sync, actor_learner, central_inference, data_parallel."""
    runtime: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = None
    """Where actors and learners run: inline, process, ray."""
    actors: Number = None
    """Actor processes, in topologies that have actors."""
    learners: Number = None
    """Learner processes; each computes gradients on its share of every batch."""
    init: Annotated[str | None, tyro.conf.arg(metavar="RUN", help_behavior_hint="")] = None
    """Run, or one of its checkpoints, whose weights and observation statistics to start from."""
    set: Settings = ()
    """Any setting, such as learning_rate=3e-4 hidden_sizes=64,64 eval_episodes=20; they are listed below."""
    config: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """YAML file with settings, such as config.yaml of another run."""
    preset: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = None
    """Environment whose preset to start from, or none; `corral list presets` shows them."""
    callback: Callbacks = ()
    """Your own corral.Callback."""
    sink: Sinks = ()
    quiet: Quiet = False

    @staticmethod
    def more_help(args: Sequence[str]) -> str:
        """The settings of the algorithm in `args`, with the values of a preset that they name."""
        from corral.config.describe import describe_settings
        from corral.config.presets import find, presets_of

        first = _EXAMPLE if args[0].startswith("-") else args[0]
        algo = next((arg for arg in args if arg in ALGORITHMS), first)
        given = dict(pairwise(args)) | dict(arg.split("=", 1) for arg in args if "=" in arg)
        preset = given.get("--preset") or find(algo, given.get("--env", "")) or "none"
        width = min(shutil.get_terminal_size().columns, _MAX_WIDTH)
        return describe_settings(algo, preset if preset in presets_of(algo) else "none", width)

    def run(self) -> int:
        settings = self._settings()
        from corral.runs.train import train

        result = train(
            self.algo,
            run_dir=self.run_dir,
            config_file=self.config,
            overwrite=self.overwrite,
            callbacks=self.callback,
            sinks=self.sink,
            quiet=self.quiet,
            **settings,
        )
        print_result(result)
        return 0

    def _env_kwargs(self) -> dict[str, Any]:
        """Keyword arguments of the environment, including those of its simulators."""
        kwargs = parse_env_kwargs(self.env_kwargs)
        if self.sim is None and self.sims is not None:
            raise UserError("--sims needs --sim, the command that starts a simulator.")
        if self.sim is not None:
            if self.env is not None and "://" not in self.env:
                raise UserError(f"--sim starts simulators for a URL, such as --env tcp://127.0.0.1:0, not {self.env}.")
            kwargs |= {"sim": _from_anywhere(self.sim), "sims": read_value("--sims", self.sims or "1", int)}
        return kwargs

    def _settings(self) -> dict[str, Any]:
        items = split_items(chain.from_iterable(self.set))
        given: dict[str, Any] = {key.replace("-", "_"): text for key, text in items.items()}
        refuse_arguments(given, _NO_SETTINGS)
        if "env_kwargs" in given:
            given["env_kwargs"] = read_value("env_kwargs", given["env_kwargs"], dict[str, Any])
        own = {name: getattr(self, name) for name in _OPTIONS} | {"env_kwargs": self._env_kwargs() or None}
        for name, value in own.items():
            if value is not None:
                if name in given:
                    raise UserError(f"{name} is set twice, by --{name.replace('_', '-')} and by --set.")
                given[name] = value
        return given


def refuse_arguments(given: Iterable[str], arguments: Mapping[str, str]) -> None:
    """UserError if a name given by --set is an argument or another option of the command."""
    for name in given:
        if argument := arguments.get(name):
            raise UserError(f"{name} is not a setting: use the argument {argument}.")


def print_result(result: Result) -> None:
    """Print where the run is, its evaluation, and the next commands."""
    path = shlex.quote(str(result.run_dir))
    stopped = "stopped after " if result.stopped else ""
    reason = f": {result.stop_reason}" if result.stop_reason else ""
    count = result.eval_episodes
    show = number_format(result.eval_return, result.best_return, result.best_report)
    score = f"mean return {show(result.eval_return)} over {count} episode{'s' * (count != 1)}"
    if not math.isnan(result.best_return):
        score += f"; best {show(result.best_return)} after {result.best_step:,} steps"
    if not math.isnan(result.best_report):
        score += f", {show(result.best_report)} in episodes that did not select it"
    resume = f"corral resume {path}" + ("" if result.stopped else f" --steps {2 * result.steps}")
    print(f"Run: {path}, {stopped}{result.steps:,} steps in {result.wall_s:.1f} s{reason}")
    print(f"Evaluation: {'none' if math.isnan(result.eval_return) else score}")
    print(f"Next: corral eval {path} | corral plot {path} -o curve.png | {resume}")


def _from_anywhere(command: str) -> str:
    """The command with the full path of its program, so that it also works from elsewhere."""
    program, space, rest = command.partition(" ")
    plain = "/" in program and not program.startswith(("'", '"'))
    return f"{Path(program).absolute()}{space}{rest}" if plain else command
