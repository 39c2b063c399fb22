"""Settings of earlier versions: migrated in a run's `config.yaml`, rejected with a hint if a user passes them.

Also the metrics and files of a run whose names have changed. The only place for old names. `config.yaml` contains its
format. Each format has one step that migrates it to the next, so that a later change of a name or a default adds a step
and leaves the others alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from corral.config.yaml_file import read_yaml
from corral.core.errors import UserError

FORMAT = 4  # the format that this version writes

_GROUPS_1 = {"scale", "sharing", "evaluation", "checkpoints", "log"}
"""Format 1 had no number; its files hold every setting, and so all of these."""

_ENVS_2 = {
    "corral.testing.hybrid:MoveOrShoot": "corral.testing.tasks:MoveOrShoot",
    "corral.testing.hybrid_walk:HybridWalk": "corral.testing.tasks:HybridWalk",
    "corral.testing.stateless:StatelessCartPole": "corral.testing.tasks:StatelessCartPole",
}

ALGORITHM_2 = {
    "lr": "learning_rate", "lam": "gae_lambda", "length": "num_steps", "epochs": "update_epochs",
    "minibatches": "num_minibatches", "clip": "clip_coef", "clip_value": "clip_range_vf", "entropy": "ent_coef",
    "value_coef": "vf_coef", "normalize_return": "normalize_advantage", "episodes": "episodes_per_update",
    "capacity": "buffer_size", "replay_capacity": "buffer_size", "train_every": "train_frequency",
    "updates": "gradient_steps", "target_every": "target_update_period", "double": "double_q",
    "prioritised": "prioritized_replay", "ladder": "epsilon_ladder", "epsilon_start": "exploration_initial_eps",
    "epsilon_end": "exploration_final_eps", "epsilon_fraction": "exploration_fraction", "correction": "vtrace",
    "rho_bar": "vtrace_rho", "c_bar": "vtrace_c", "replayed": "replay_fraction", "max_lag": "max_policy_lag",
    "mode": "search_mode", "sims": "num_simulations", "fast_sims": "fast_simulations",
    "full_share": "full_search_fraction", "share": "search_fraction", "beta": "search_acts_fraction",
    "distill": "distill_coef", "kappa": "search_value_fraction", "gate": "min_explained_variance",
    "epsilon": "random_action_fraction", "noise": "root_noise", "past_share": "past_self_fraction",
    "scripted": "opponents", "scripted_share": "opponent_fraction", "replays": "replay_ratio",
}  # fmt: skip
_OTHERWISE_2 = {
    "alphazero": {"value_coef": "value_coef", "anneal_lr": "final_lr_fraction"},
    "ppo-search": {"rho_bar": "max_importance_weight"},
}
"""Algorithms whose own setting of such a name has another meaning."""

_INNER_2 = {
    "net": {
        "torso": "encoder", "hidden": "hidden_sizes", "core": "rnn", "core_size": "rnn_size", "log_std": "log_std_init",
    },
    "search": {
        "root": "root_selection", "leaves": "leaves_in_flight", "samples": "num_sampled_actions",
        "considered": "max_num_considered_actions", "widening": "progressive_widening", "grain": "value_resolution",
        "dirichlet_frac": "dirichlet_fraction", "reuse": "reuse_tree",
    },
}  # fmt: skip
"""Groups within the algorithm's settings."""

_EXPERIMENT_2 = {
    "threads": "torch_threads",
    **{
        f"scale.{name}": f"actor_learner.{name}" for name in ("learners", "replay_shards", "min_actors", "max_restarts")
    },
    "scale.weights": "actor_learner.weight_sync",
    **{f"sharing.{name}": f"data_parallel.{name}" for name in ("exchange", "mode", "servers", "compress")},
    "sharing.quantize_weights": "data_parallel.quantize_weights",
    "sharing.drop": "data_parallel.backup_workers",
    "sharing.graph": "data_parallel.gossip_graph",
    "sharing.momentum": "data_parallel.compress_momentum",
    "evaluation.every_steps": "eval_every",
    "evaluation.episodes": "eval_episodes",
    "evaluation.env_kwargs": "eval_env_kwargs",
    "checkpoints.every_s": "checkpoint_every_s",
    "checkpoints.every_steps": "checkpoint_every",
    "checkpoints.keep": "keep_checkpoints",
    "checkpoints.replay": "save_replay_buffer",
    "log.every_s": "log_every_s",
    "log.every_steps": "log_every",
}

_MERGED_2 = {
    "anneal_clip": ("clip_coef", "it was merged into clip_coef: write clip_coef=0.2:0."),
    "anneal_lr": ("final_lr_fraction", "alphazero has final_lr_fraction: 0.1 anneals the learning rate, 1 does not."),
    "correction": ("vtrace", "it is called vtrace, true or false."),
    "lag": ("mode", "it was merged into mode: write mode=ssp:K."),
    "pull_lag": ("weight_sync", "it was merged into weight_sync: write weight_sync=lag:K."),
    "envs_per_actor": ("num_envs", "set num_envs, the number of environments of all actors together."),
}
"""Old name -> the setting that replaces it in another form, and how."""

_DROPPED_2: dict[str, tuple[Any, str]] = {
    "past_every": (0.05, "a past self is kept after every 5 % of the run."),
    "past_kept": (10, "the last 10 past selves are kept."),
    "steps_per_turn": (8, "environments make 8 moves between updates."),
    "weight_decay": (1e-4, "it is always 1e-4."),
    "in_flight_mb": (256.0, "it is always 256."),
    "error_feedback": (None, "error feedback is used wherever a compression is biased."),
    "listen": (None, "train with --env grpc://HOST:PORT, and start `corral serve ENV --connect grpc://HOST:PORT`."),
}
"""Removed settings -> their default, and what happens now."""

_METRICS_2 = {
    "exchange/let_go": "exchange/timeouts",
    "learners/left_out": "learners/dropped_batches",
    "search/learned_share": "search/learned_fraction",
}
"""Metrics in the `metrics.csv` and the checkpoints of a run."""

OLD_FILES = ("parts.json",)
"""Files of a run folder that are no longer written: `processes.json` has replaced this one."""


@dataclass(frozen=True)
class Migrated:
    """Settings in today's names, and notes on those that were lost."""

    settings: dict[str, Any]
    notes: tuple[str, ...] = ()


def read_config(path: Path) -> Migrated:
    """The settings in a YAML file of a user, or in the `config.yaml` of a run of any version."""
    return migrate(read_yaml(path), str(path))


def migrate(config: Mapping[str, Any], source: str) -> Migrated:
    """The settings of a `config.yaml` as this version would have written them, without the format number."""
    found, notes = dict(config), list[str]()
    written = found.pop("format", 1 if found.keys() >= _GROUPS_1 else FORMAT)
    if not isinstance(written, int) or not 1 <= written <= FORMAT:
        raise UserError(
            f"{source} has format {written}, but this version of Corral reads 1 to {FORMAT}: use the version that "
            "wrote it."
        )
    for step in range(written, FORMAT):
        try:
            found = _STEPS[step](found, notes)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise UserError(f"{source} is not a config of format {step}, as it claims: {error}.") from error
    return Migrated(found, tuple(notes))


def rename_envs(state: Any) -> None:
    """Rename environments in the state of a checkpoint, in place."""
    if isinstance(state, list):
        for value in state:
            rename_envs(value)
    elif isinstance(state, dict):
        for key, value in state.items():
            rename_envs(value)
            if key == "identity" and isinstance(value, dict) and value.get("env") in _ENVS_2:
                value["env"] = _ENVS_2[value["env"]]


def metric_name(name: str) -> str:
    """Today's name of a metric."""
    return _METRICS_2.get(name, name)


def explain_old_name(key: str, names: Collection[str]) -> str | None:
    """What to write instead of an old name, as the end of a sentence; None if it is not old. `names` are today's."""
    last = key.rpartition(".")[2]
    if last in _MERGED_2 and _named(_MERGED_2[last][0], names):
        return _MERGED_2[last][1]
    if last in _DROPPED_2:
        return f"it was removed: {_DROPPED_2[last][1]}"
    new = [_EXPERIMENT_2[key]] if key in _EXPERIMENT_2 else successors(key, names)
    return f"it is called {' or '.join(new)} now." if new else None


def explain_old_value(name: str, value: Any) -> str:
    """What to do instead of a value that a setting no longer has, to be appended to a sentence."""
    return f" It was removed: {_DROPPED_2['listen'][1]}" if (name, value) == ("backend", "grpc") else ""


def successors(key: str, names: Collection[str]) -> list[str]:
    """New names of every setting, or of the settings of a group, that had this name."""
    last = key.rpartition(".")[2]
    tables = [ALGORITHM_2, *_OTHERWISE_2.values(), *_INNER_2.values()]
    new = [table[last] for table in tables if table.get(last, last) != last]
    new += [full for old, full in _EXPERIMENT_2.items() if last in (old.rpartition(".")[2], old.partition(".")[0])]
    return list(dict.fromkeys(name for name in new if _named(name, names)))


def _named(name: str, names: Collection[str]) -> bool:
    return any(f".{full}".endswith(f".{name}") for full in names)


def _to_2(config: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """Names of SB3, CleanRL and the papers; groups only where a topology has one."""
    config |= {name: _ENVS_2[config[name]] for name in ("env", "preset") if config.get(name) in _ENVS_2}
    _drop_grpc(config, notes)
    scale, sharing = dict(config.get("scale") or {}), dict(config.get("sharing") or {})
    per_actor = scale.pop("envs_per_actor", None)
    if per_actor is not None:
        config["num_envs"] = per_actor * (config.get("actors") or 1)
    lag = scale.pop("pull_lag", 0)
    if scale.get("weights") == "lag":
        scale["weights"] = f"lag:{lag}"
    lag = sharing.pop("lag", 0)
    if sharing.get("mode") == "lag":
        sharing["mode"] = f"ssp:{lag}"
    _drop(scale, notes)
    _drop(sharing, notes)
    made: dict[str, Any] = {}
    for name, value in (config | {"scale": scale, "sharing": sharing}).items():
        if name == "algorithm":
            made[name] = _algorithm_to_2(value or {}, str(config.get("algo")), notes)
        elif name in _GROUPS_1:
            for inner, one in (value or {}).items():
                full = f"{name}.{inner}"
                group, _, new = _EXPERIMENT_2.get(full, full).rpartition(".")
                (made.setdefault(group, {}) if group else made)[new] = one
        else:
            made[_EXPERIMENT_2.get(name, name)] = value
    return made


def _drop_grpc(config: dict[str, Any], notes: list[str]) -> None:
    listen = config.pop("listen", None)
    if config.get("backend") == "grpc":
        config["backend"] = "auto"
        notes.append(
            "This run had its environments on other machines (backend=grpc, since removed); now they run here. To run "
            f"them elsewhere, train with --env grpc://{listen} and start `corral serve {config.get('env')} --connect "
            f"grpc://{listen}` there."
        )


def _algorithm_to_2(config: Mapping[str, Any], algo: str, notes: list[str]) -> dict[str, Any]:
    if ":" in algo:
        return _own_algorithm_to_2(config, algo)
    config = dict(config)
    if config.pop("anneal_clip", False):
        config["clip"] = f"{config['clip']}:0"
    if "correction" in config:
        config["correction"] = config["correction"] == "vtrace"
    if algo == "alphazero":
        config["anneal_lr"] = 0.1 if config.get("anneal_lr", True) else 1.0
    _drop(config, notes)
    names = ALGORITHM_2 | _OTHERWISE_2.get(algo, {})
    made: dict[str, Any] = {}
    for name, value in config.items():
        if name == "ppo":
            made[name] = _algorithm_to_2(value, "ppo", notes)
        elif name in _INNER_2:
            made[name] = {_INNER_2[name].get(inner, inner): one for inner, one in value.items()}
        else:
            made[names.get(name, name)] = _schedule_to_2(value)
    return made


def _own_algorithm_to_2(config: Mapping[str, Any], algo: str) -> dict[str, Any]:
    from corral.algos.registry import find_algorithm

    try:
        return _rename_where_gone(config, find_algorithm(algo).config()())
    except UserError:  # it cannot be imported here: the settings stay as they are until it can
        return dict(config)


def _rename_where_gone(config: Mapping[str, Any], today: Any) -> dict[str, Any]:
    """Rename in an algorithm outside Corral: only names that its Config lacks, to names that it has."""
    known, made = {field.name for field in fields(today)}, dict[str, Any]()
    table = ALGORITHM_2 | _INNER_2["net"] | _INNER_2["search"]
    for name, value in config.items():
        new = table[name] if name not in known and table.get(name) in known else name
        inner = getattr(today, new, None)
        made[new] = _rename_where_gone(value, inner) if is_dataclass(inner) else _schedule_to_2(value)
    return made


def _schedule_to_2(value: Any) -> Any:
    """A schedule was written 8->64."""
    return value.replace("->", ":") if isinstance(value, str) and re.match(r"[-+\s]*[0-9.]", value) else value


def _drop(config: dict[str, Any], notes: list[str]) -> None:
    """Remove dropped settings, with a note for those that were not the default."""
    for name in [name for name in config if name in _DROPPED_2]:
        value, (default, instead) = config.pop(name), _DROPPED_2[name]
        if value != default:
            notes.append(f"{name}={value} is no longer a setting: {instead}")


def _to_3(config: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """A dueling network has a hidden layer for each stream; it had one head before."""
    algorithm = config.get("algorithm") or {}
    if config.get("algo") in ("dqn", "apex") and algorithm.get("dueling") is True:
        config["algorithm"] = algorithm | {"dueling": "shared"}
    return config


def _to_4(config: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """Networks encode bytes and float images in another way, and image networks take the free cores, not all."""
    if config.get("topology") == "sync" and config.get("torch_threads", 1) is None:
        config["torch_threads"] = "all"
    return config | {"algorithm": _with_byte_encoding(config.get("algorithm") or {})}


def _with_byte_encoding(settings: Mapping[str, Any]) -> dict[str, Any]:
    """These settings, with the earlier encoding in every `NetConfig` in them."""
    made = {
        name: _with_byte_encoding(value) if isinstance(value, Mapping) else value for name, value in settings.items()
    }
    return made | ({"obs_encoding": "bytes"} if {"encoder", "rnn", "normalize_obs"} <= made.keys() else {})


_STEPS: dict[int, Callable[[dict[str, Any], list[str]], dict[str, Any]]] = {1: _to_2, 2: _to_3, 3: _to_4}
