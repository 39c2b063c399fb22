"""Settings that change when a run is resumed, and the reasons why others cannot."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from corral.config import overrides as settings
from corral.config.experiment import Experiment
from corral.core.errors import UserError
from corral.core.types import EnvSpec
from corral.runs.checkpoints import checkpoint
from corral.runs.folder import RunFolder

if TYPE_CHECKING:
    from corral.algos.base import Algorithm

_NET = ".net."
_FIXED = {
    **dict.fromkeys(("env", "env_kwargs"), "the checkpoint holds its environments"),
    **dict.fromkeys(("algo", "topology", "actor_learner.replay_shards"), "the checkpoint is laid out by it"),
    "algorithm.optimizer": "the checkpoint holds the state of the other one",
    "normalize_reward": "the network has learned from rewards of another scale",
    "precision": "it is chosen once for a run",
    **dict.fromkeys(("preset", "seed", "init"), "it only says how a run starts"),
}
"""Settings that never change -> why."""
_STORED = ("unit", "length", "reuse", "extras", "prioritised", "capacity", "replayed")
"""Fields of a `DataSpec` that the data of a checkpoint has been laid out by."""


def give_env(experiment: Experiment, env: Callable[..., Any]) -> Experiment:
    """The experiment of a run whose environment only the script that trained it could build, with its factory."""
    if not experiment.env.startswith("<"):
        raise UserError(
            f"This run's environment is {experiment.env}, which it builds itself: leave env out, or start a new run "
            "from its weights with init."
        )
    if not callable(env):
        raise UserError(f"env must be a factory, as the run was trained with, got {env!r}.")
    return replace(experiment, factory=env)


def change_settings(experiment: Experiment, given: Mapping[str, Any], folder: RunFolder) -> Experiment:
    """The experiment with these settings; UserError if the run's checkpoint does not fit them."""
    values = settings.read(experiment, given)
    changed = {name: value for name, value in values.items() if value != attrgetter(name)(experiment)}
    for name in changed:
        reason = "it changes the network" if _NET in name else _FIXED.get(name)
        if reason:
            raise _refusal(name, reason, experiment, folder.path)
    actors = changed.get("actors") or experiment.num_actors
    if experiment.num_envs % actors and "num_envs" not in changed:
        changed["num_envs"] = -(-experiment.num_envs // actors) * actors
    if changed.get("steps", experiment.steps) < experiment.steps:
        raise UserError(
            f"{folder.path} is set to {experiment.steps:,} steps: set at least as many, got {changed['steps']:,}."
        )
    if "steps" in changed:  # a tenth of the longer run would be another interval: keep the old one
        changed.setdefault("eval_every", experiment.eval_interval)
        changed.setdefault("eval_max_fraction", experiment.eval_limit)
    made = settings.apply(experiment, changed)
    _require_same_layout(experiment, changed, made, folder)
    return made


def describe_changes(before: Experiment, after: Experiment) -> str:
    """Settings that differ, with both values; empty if none does."""
    names = {**settings.leaves(before), **settings.leaves(after)}
    found = {name: (attrgetter(name)(before), attrgetter(name)(after)) for name in names}
    return ", ".join(
        f"{settings.short_name(name, names)}: {old} -> {new}" for name, (old, new) in found.items() if old != new
    )


def _require_same_layout(before: Experiment, changed: Mapping[str, Any], made: Experiment, folder: RunFolder) -> None:
    """UserError if the network or the saved data would have another layout."""
    if not any(name == "num_envs" or name.startswith("algorithm.") for name in changed):
        return
    spec = EnvSpec.from_json(checkpoint.load(folder, only=checkpoint.POLICY)[1]["spec"])
    expected = _layout(before, spec)
    if _layout(made, spec) == expected:
        return
    alone = [name for name, value in changed.items() if _differs(before, name, value, spec, expected)]
    if alone:
        raise _refusal(alone[0], "it changes the layout of the network or of the saved data", before, folder.path)
    names = ", ".join(changed)
    raise _refusal(names, "together they change the layout of the network or of the saved data", before, folder.path)


def _differs(before: Experiment, name: str, value: Any, spec: EnvSpec, expected: Any) -> bool:
    """Whether this setting alone changes the layout."""
    with contextlib.suppress(UserError):  # it may need another one
        return bool(_layout(settings.apply(before, {name: value}), spec) != expected)
    return False


def _layout(experiment: Experiment, spec: EnvSpec) -> Any:
    """What a checkpoint of this experiment is laid out by: shapes of the network, and of the data that is saved."""
    import torch

    from corral.topologies.base import make_algorithm

    algo: Algorithm = make_algorithm(experiment, spec)
    with torch.device("meta"):
        shapes = {name: tuple(value.shape) for name, value in algo.build_model().state_dict().items()}
    data = algo.data
    saved = experiment.topology == "sync" or (experiment.topology != "data_parallel" and data.reuse == "replay")
    stored = [getattr(data, name) for name in _STORED] + [experiment.num_envs]
    stored += [data.gamma] if data.unit == "transition" else []
    stored += [data.batch_size] if data.reuse == "once" else []
    return shapes, stored if saved else None


def _refusal(name: str, reason: str, experiment: Experiment, path: Path) -> UserError:
    short = settings.short_name(name, settings.leaves(experiment)) if "," not in name else name
    return UserError(
        f"{short} cannot change when a run is resumed, because {reason}: start a new run from its weights with "
        f"`corral train {experiment.algo} --init {path}`."
    )
