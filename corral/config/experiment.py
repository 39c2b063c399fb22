"""`Experiment`: all settings of a run, from defaults, preset, YAML file and caller, as one frozen dataclass."""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from corral.algos.registry import describe_algorithm, find_algorithm
from corral.config import overrides as settings
from corral.config import presets
from corral.config.environment import describe_env, find_env, folder_name
from corral.config.migrate import read_config
from corral.core.errors import UserError
from corral.core.machine import cores
from corral.envs.supervision import Supervision
from corral.learn.exchange.config import DataParallelConfig
from corral.nets.config import NetConfig

if TYPE_CHECKING:
    from corral.envs.resolve import EnvLike

_log = logging.getLogger(__name__)
_DEVICE = re.compile(r"auto|cpu|mps|cuda(:\d+)?")
_WEIGHT_SYNC = re.compile(r"auto|sync|async|lag:\d+")
_EVALUATIONS = 10
_EVAL_FRACTION = 0.2
_MAX_PER_CORE = 4  # learner processes per core of one machine: more only wait for each other


@dataclass(frozen=True)
class ActorLearnerConfig:
    """Settings of topologies with actors."""

    learners: int = 1
    """Learner processes. Each computes gradients on its share of every batch, and all apply the mean."""
    weight_sync: str = "auto"
    """When actors get new weights: sync (all wait for each update), async (the newest at any time), lag:K (when more
    than K versions behind); auto: sync for on-policy algorithms, else async."""
    replay_shards: int = 0
    """Processes that hold the replay buffer; 0: the learner holds it."""
    min_actors: int = 1
    """With fewer live actors, the run waits until crashed ones are restarted."""
    max_restarts: int = 20
    """Restarts of a process before the run gives up on it."""
    silence_timeout_s: float = 30.0
    """Seconds after which a process that does not even say that it lives, because it is stopped or frozen, is lost."""

    def __post_init__(self) -> None:
        if not 5 <= self.silence_timeout_s < float("inf"):
            raise UserError(
                f"actor_learner.silence_timeout_s must be at least 5 and finite, got {self.silence_timeout_s:g}: "
                "processes say that they live every second."
            )
        _at_least("actor_learner.", self, learners=1, replay_shards=0, min_actors=1, max_restarts=0)
        if not _WEIGHT_SYNC.fullmatch(self.weight_sync):
            raise UserError(
                "actor_learner.weight_sync must be auto, sync, async or lag:K, such as lag:2, "
                f"got {self.weight_sync!r}."
            )

    @property
    def weight_lag(self) -> int:
        return int(self.weight_sync.partition(":")[2] or 0)


@dataclass(frozen=True)
class Experiment:
    """The settings of a run. `algorithm` is the Config of the algorithm that `algo` names."""

    algo: str
    """Name of the algorithm."""
    env: str
    """Gymnasium id, `module:Class`, URL of external simulators, or `<name>` of a callable of this process."""
    env_kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the environment; for an Atari id, options of the Atari suite."""
    preset: str = "none"
    """Preset that the settings started from."""
    init: str | None = None
    """Run, or one of its checkpoints, whose weights the network starts from; none: new weights."""
    steps: int = 100_000
    """Environment steps of the whole run."""
    seed: int = 0
    """Seed of all random numbers."""
    num_envs: int = 8
    """Parallel environments, over all actors."""
    backend: Literal["auto", "local", "process", "native", "ray"] = "auto"
    """How the environments run."""
    workers: int | None = None
    """Worker processes or threads of the environments; none: the backend decides."""
    worker_cpus: float | None = None
    """With backend=ray: CPUs that each worker reserves; none: 1, or less if the environments' steps mostly wait."""
    supervision: Supervision = field(default_factory=Supervision)
    topology: Literal["sync", "actor_learner", "central_inference", "data_parallel"] = "sync"
    """How acting and learning are distributed."""
    runtime: Literal["auto", "inline", "process", "ray"] = "auto"
    """Where the components of the topology run: threads, processes of this machine, or a Ray cluster."""
    actors: int | None = None
    """Number of actors, in topologies other than sync; none: one per free core, and with central inference one per
    environment if its steps wait for something. In data_parallel they also learn."""
    actor_learner: ActorLearnerConfig = field(default_factory=ActorLearnerConfig)
    data_parallel: DataParallelConfig = field(default_factory=DataParallelConfig)
    device: str = "auto"
    """Device of the networks: auto, cpu, cuda, cuda:1, mps."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Precision of image encoders; auto: bf16 if measured to be clearly faster, else fp32. All else is float32."""
    torch_threads: int | Literal["all"] | None = None
    """Number of torch threads; none: 1 for small networks, the free cores for image networks (measured at the start
    and kept in sync, adapted elsewhere); all: all cores for image networks."""
    normalize_reward: bool = False
    """Divide rewards by the running standard deviation of the discounted return."""
    algorithm: Any = None
    """Settings of the algorithm."""
    eval_every: int = 0
    """Environment steps between evaluations; 0: a tenth of the run, and fewer where they are slow."""
    eval_max_fraction: float | None = None
    """Fraction of the wall time that evaluations may take, others are left out; none: 0.2 if eval_every is 0, else 1.
    There is always one at the end."""
    eval_background: bool = False
    """Evaluate in another process, while training continues; the evaluation at the end is waited for."""
    eval_episodes: int = 10
    """Episodes of each evaluation, once deterministic and once sampled; 0: no evaluation."""
    eval_env_kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the environment that differ in evaluations, such as the opponent in a game."""
    checkpoint_every_s: float = 60.0
    """Seconds between checkpoints; 0: not by time. The run is also saved at its end and when it is stopped."""
    checkpoint_every: int = 0
    """Environment steps between checkpoints; 0: not by steps."""
    keep_checkpoints: int = 3
    """Checkpoints to keep, besides the best."""
    save_replay_buffer: bool = True
    """Save the replay buffer in checkpoints, so that a resumed run continues exactly."""
    log_every_s: float = 1.0
    """Seconds between rows of metrics; 0: not by time."""
    log_every: int = 0
    """Environment steps between rows of metrics; 0: not by steps."""
    factory: Any = field(default=None, repr=False, compare=False, metadata={"live": True})
    """The callable that `<name>` stands for, in the process that has it."""
    algo_class: Any = field(default=None, repr=False, compare=False, metadata={"live": True})
    """The class that `algo` stands for, where it cannot be imported."""
    untrusted: str = field(default="", repr=False, compare=False, metadata={"live": True})
    """Why the environment, which a run folder names, must not be built."""

    def __post_init__(self) -> None:
        _at_least("", self, steps=1, seed=0, num_envs=1, workers=1, actors=1)
        if self.torch_threads != "all":
            _at_least("", self, torch_threads=1)
        if self.worker_cpus is not None and self.backend != "ray":
            raise UserError("worker_cpus says what workers reserve on Ray: set backend=ray, or omit it.")
        _at_least("", self, eval_every=0, eval_episodes=0, checkpoint_every_s=0, checkpoint_every=0)
        _at_least("", self, keep_checkpoints=1, log_every_s=0, log_every=0)
        if self.eval_max_fraction is not None and not 0 <= self.eval_max_fraction <= 1:
            raise UserError(f"eval_max_fraction must be between 0 and 1, got {self.eval_max_fraction}.")
        if self.eval_background and "://" in self.env:
            raise UserError(
                f"eval_background builds environments in another process, and the simulators at {self.env} belong to "
                "this one: omit it."
            )
        if not _DEVICE.fullmatch(self.device):
            raise UserError(f"device must be auto, cpu, cuda, cuda:N or mps, got {self.device!r}.")
        if self.topology != "data_parallel" and self.data_parallel != DataParallelConfig():
            raise UserError(f"{_changed(self.data_parallel)} needs topology=data_parallel.")
        if self.topology == "sync":
            self._check_sync()
        elif self.actor_learner.min_actors > self.num_actors:
            raise UserError(f"min_actors={self.actor_learner.min_actors} exceeds the {self.num_actors} actors.")
        elif self.topology == "central_inference" and self.backend in ("local", "native"):
            raise UserError(
                f"central_inference runs environments in other processes, and backend={self.backend} has none: set "
                "a different backend, or, for search algorithms, topology=actor_learner."
            )
        elif self.num_envs % self.num_actors:
            raise UserError(
                f"{self.num_envs} environments cannot be divided among {self.num_actors} actors; "
                f"set num_envs to a multiple of {self.num_actors}."
            )
        if self.topology == "data_parallel":
            self._check_data_parallel()

    def _check_sync(self) -> None:
        if self.actors is not None:
            raise UserError("The topology 'sync' has no actors: set num_envs, or topology=actor_learner.")
        if self.runtime in ("process", "ray"):
            raise UserError(
                f"Topology 'sync' runs in one process: runtime={self.runtime} requires a different topology, such as "
                "actor_learner."
            )
        if self.actor_learner != ActorLearnerConfig():
            raise UserError(
                f"{_changed(self.actor_learner)} requires a topology other than 'sync', such as actor_learner."
            )

    def _check_data_parallel(self) -> None:
        for name in ("learners", "replay_shards", "weight_sync"):
            if getattr(self.actor_learner, name) != getattr(ActorLearnerConfig, name):
                raise UserError(f"{name} does not apply to data_parallel: set actors, exchange and mode.")
        config = self.data_parallel
        if config.backup_workers >= self.num_actors:
            raise UserError(f"backup_workers={config.backup_workers} must be below the {self.num_actors} workers.")
        most = _MAX_PER_CORE * cores()
        servers = config.num_servers
        if self.runtime in ("auto", "process") and self.num_actors + max(0, servers - 1) > most:
            and_servers = f" and {servers} servers" if servers > 1 else ""
            raise UserError(
                f"{self.num_actors} workers{and_servers} are too many for the {cores()} cores of this machine: "
                f"use at most {most}, or runtime=ray with a cluster."
            )

    @classmethod
    def make(
        cls,
        algo: str | type[Any],
        env: EnvLike | None = None,
        *,
        preset: str | None = None,
        config_file: str | Path | None = None,
        overrides: Mapping[str, Any] | None = None,
    ) -> Experiment:
        """An experiment from its defaults, the preset, a YAML file and `overrides`; the last wins.

        `overrides` are named as in `corral.config.overrides`: `learning_rate`, `algorithm.learning_rate`, `steps`, ...
        `preset` is the environment whose preset to use, or "none"; default: that of `env`, if there is one.
        """
        algo, algo_class = describe_algorithm(algo)
        entry = find_algorithm(algo, algo_class)
        base = cls(algo=algo, env="", algorithm=entry.config()(), algo_class=algo_class)
        given = settings.read(base, overrides or {})
        from_file = {} if config_file is None else _read_file(base, Path(config_file))
        factory = None
        if env is not None:
            if "env" in given:
                raise UserError("env is set twice.")
            text, kwargs, factory = describe_env(env)
            given["env"] = text
            if from_file.get("env", text) != text:
                from_file.pop("env_kwargs", None)  # they belong to another environment
            if kwargs and given.get("env_kwargs"):
                raise UserError(f"{text} already includes its options; set them there, not in env_kwargs.")
            given |= settings.read(base, {"env_kwargs": kwargs}) if kwargs else {}
        asked = from_file | given
        if not asked.get("env"):
            raise UserError(f"{algo} needs an environment: set env, such as CartPole-v1.")
        if asked.get("algo", algo) != algo:
            raise UserError(f"algo is set twice, to {algo} and {asked['algo']}.")
        asked["preset"] = _preset_name(algo, asked["env"], preset or asked.get("preset"))
        from_preset = settings.read(base, presets.settings(algo, asked["preset"]))
        own = settings.read(base, entry.settings)
        chosen = _drop_conflicting(own, asked) | from_preset | asked | {"factory": factory}
        token = chosen.get("env_kwargs", {}).get("token_file")
        if "://" in chosen["env"] and isinstance(token, str):  # the run may be resumed from elsewhere
            chosen["env_kwargs"] = chosen["env_kwargs"] | {"token_file": str(Path(token).absolute())}
        # Central inference measures the environment first: where steps wait, it takes a worker for each.
        if chosen.get("topology", base.topology) not in ("sync", "central_inference") and chosen.get("actors") is None:
            free = max(1, cores() - (chosen["topology"] != "data_parallel"))  # one per core that the learner leaves
            num_envs = chosen.get("num_envs", base.num_envs)
            chosen["actors"] = max(count for count in range(1, free + 1) if num_envs % count == 0)
        made = settings.apply(base, chosen)
        for name, value in asked.items():
            if value != from_preset.get(name, attrgetter(name)(base)):
                _require_used(made, name)
        made.environment()
        return made

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any], source: str = "") -> Experiment:
        """The experiment that `to_dict` described; `source` names the file in messages."""
        algo = plain.get("algo")
        if not isinstance(algo, str):
            raise UserError(f"{source or 'The settings'} must set algo, the name of the algorithm.")
        base = cls(algo=algo, env="", algorithm=find_algorithm(algo).config()())
        return settings.apply(base, settings.read(base, plain, source))

    def to_dict(self) -> dict[str, Any]:
        return settings.to_plain(self)

    @property
    def learner_in_own_process(self) -> bool:
        """Whether the learner has its own process, which is restarted after a crash."""
        return self.topology != "sync" and self.runtime != "inline"

    @property
    def num_actors(self) -> int:
        return self.actors or 1

    @property
    def envs_per_actor(self) -> int:
        return self.num_envs // self.num_actors

    @property
    def eval_interval(self) -> int:
        return self.eval_every or max(1, self.steps // _EVALUATIONS)

    @property
    def eval_limit(self) -> float:
        """Fraction of the wall time that evaluations may take."""
        if self.eval_max_fraction is not None:
            return self.eval_max_fraction
        return 1.0 if self.eval_every else _EVAL_FRACTION

    def environment(self) -> tuple[EnvLike, dict[str, Any]]:
        """The environment and its keyword arguments, for `make_vec`; everything that builds it asks here."""
        if self.untrusted:
            raise UserError(self.untrusted)
        return find_env(self.env, self.env_kwargs, self.factory)

    def default_run_dir(self, root: str | Path = "runs") -> Path:
        """The first folder `root/algo-env-seed-n` that does not exist."""
        env, number = folder_name(self.env, self.env_kwargs), 1
        algo = self.algo.rpartition(":")[2].strip("<>")
        while (path := Path(root) / f"{algo}-{env}-{self.seed}-{number}").exists():
            number += 1
        return path


def _read_file(base: Experiment, path: Path) -> dict[str, Any]:
    """Settings from a YAML file, by full name; a run's `config.yaml` is such a file."""
    found = read_config(path)
    for note in found.notes:
        _log.warning("%s: %s", path, note)
    given = found.settings
    if given.get("algo", base.algo) != base.algo:
        raise UserError(f"{path} is for {given['algo']}, not for {base.algo}.")
    return settings.read(base, given, str(path))


def _drop_conflicting(own: dict[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    """An algorithm's own settings, without those that conflict with the user's choices."""
    both = own | dict(asked)
    exchange, remaining = both.get("data_parallel.exchange", "all_reduce"), dict(own)
    if "data_parallel.exchange" in asked and exchange == "all_reduce":
        remaining.pop("data_parallel.mode", None)
    if exchange != "gossip":
        remaining.pop("data_parallel.gossip_graph", None)
    if "://" in str(asked.get("env", "")):  # simulators run where they are
        remaining.pop("backend", None)
    return remaining


def _require_used(made: Experiment, name: str) -> None:
    """UserError if a setting of a network has no effect; only for new runs, so that earlier ones still load."""
    group, _, setting = name.rpartition(".")
    net = attrgetter(group)(made) if group else None
    if not isinstance(net, NetConfig):
        return
    if setting == "rnn_size" and net.rnn == "none":
        raise UserError(f"rnn_size={net.rnn_size} has no effect with rnn=none: set rnn, or leave rnn_size out.")
    actions = find_algorithm(made.algo, made.algo_class).actions  # "" for a user's own algorithm
    if setting == "log_std_init" and actions and "continuous" not in actions:
        raise UserError(f"log_std_init is for continuous actions, and {made.algo} has none: leave it out.")


def _preset_name(algo: str, env: str, wanted: str | None) -> str:
    """The preset to use: the wanted one, or that of the environment; "none" if there is none."""
    if wanted is None:
        return presets.find(algo, env) or "none"
    names = presets.presets_of(algo)
    if wanted != "none" and wanted not in names:
        close = difflib.get_close_matches(wanted, names, 1, 0.5)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join([*names, 'none'])}."
        raise UserError(f"{algo} has no preset {wanted!r}; {hint}")
    return wanted


def _at_least(group: str, config: Any, **bounds: float) -> None:
    for name, least in bounds.items():
        value = getattr(config, name)
        if value is not None and value < least:
            raise UserError(f"{group}{name} must be at least {least}, got {value}.")


def _changed(config: Any) -> str:
    return ", ".join(f.name for f in fields(config) if getattr(config, f.name) != f.default)
