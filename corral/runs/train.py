"""`corral.train` and `corral.resume`: experiments in one call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from corral.config.experiment import Experiment
from corral.core.errors import UserError

if TYPE_CHECKING:
    from corral.envs.resolve import EnvLike
    from corral.runs.folder import RunFolder
    from corral.runs.session import Result


def train(  # noqa: PLR0913 - the settings that most runs name
    algo: str,
    env: EnvLike | None = None,
    steps: int | None = None,
    seed: int | None = None,
    run_dir: str | Path | None = None,
    *,
    preset: str | None = None,
    config_file: str | Path | None = None,
    env_kwargs: Mapping[str, Any] | None = None,
    quiet: bool = False,
    overwrite: bool = False,
    **overrides: Any,
) -> Result:
    """Train an agent and leave a run directory.

    Args:
        algo: name of an algorithm; `corral list algos` shows them.
        env: a Gymnasium id, `module:Class`, or a factory.
        steps: environment steps.
        seed: root of all randomness.
        run_dir: where the run is kept; by default a new folder under `runs/`.
        preset: environment whose settings to start from, or "none"; by default those for `env`, if there are any.
        config_file: YAML with settings.
        env_kwargs: keyword arguments of the environment.
        quiet: show no progress.
        overwrite: replace a run that is in `run_dir`.
        overrides: any setting, by its name: `lr=1e-3`, `num_envs=16`; dotted ones as `**{"net.hidden": (32, 32)}`.
    """
    from corral.runs.folder import RunFolder
    from corral.runs.session import Session

    given = {"steps": steps, "seed": seed, "env_kwargs": dict(env_kwargs) if env_kwargs else None}
    settings = overrides | {key: value for key, value in given.items() if value is not None}
    experiment = Experiment.make(algo, env, preset=preset, config_file=config_file, overrides=settings)
    path = Path(run_dir) if run_dir is not None else experiment.default_run_dir()
    folder = RunFolder.create(path, experiment.to_dict(), overwrite=overwrite)
    if experiment.guarded:
        return _guarded(experiment, folder, quiet=quiet)
    session = Session(experiment, folder, quiet=quiet)
    try:
        return session.run()
    finally:
        if not session.began:  # a mistake that only building the environments or the network could show
            folder.discard()


def resume(run_dir: str | Path, *, steps: int | None = None, quiet: bool = False) -> Result:
    """Go on with a run from its last intact checkpoint; `steps` may give it more to do than before."""
    from corral.runs.folder import RunFolder
    from corral.runs.session import Session

    folder = RunFolder.open(run_dir)
    experiment = Experiment.from_dict(folder.config, str(folder.path / "config.yaml"))
    if steps is not None:
        if steps < experiment.steps:
            raise UserError(
                f"{run_dir} was to run for {experiment.steps:,} steps; give at least as many, got {steps:,}."
            )
        # A tenth of the run would be another interval now: the one in force stays.
        evaluation = replace(experiment.evaluation, every_steps=experiment.evaluate_every)
        experiment = replace(experiment, steps=steps, evaluation=evaluation)
        with folder.lock():  # of a run that another process trains, nothing is changed
            folder.write_config(experiment.to_dict())
    if experiment.guarded:
        return _guarded(experiment, folder, quiet=quiet, resume=True)
    return Session(experiment, folder, resume=True, quiet=quiet).run()


def _guarded(experiment: Experiment, folder: RunFolder, *, quiet: bool, resume: bool = False) -> Result:
    from corral.runs.guard import run_guarded

    try:
        return run_guarded(experiment, folder, resume=resume, quiet=quiet)
    finally:
        if not resume and not any(folder.checkpoints.glob("*")):  # as above: it did not begin
            folder.discard()
