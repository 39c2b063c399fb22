"""`Experiment`: everything that decides what a run does, as one frozen dataclass that YAML can hold.

Settings come from four places, later ones win: the defaults, the preset of the algorithm on this environment, a
YAML file, and what the caller says.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from corral.algos.registry import find_algorithm
from corral.config import overrides as settings
from corral.config import presets
from corral.config.migrate import read_config
from corral.core.errors import UserError
from corral.core.machine import cores
from corral.learn.exchange.config import SharingConfig

if TYPE_CHECKING:
    from corral.envs.resolve import EnvLike

_DEVICE = re.compile(r"auto|cpu|mps|cuda(:\d+)?")
_PIXELS = "corral.envs.suites:pixels"
_EVALUATIONS = 10
_MAX_PER_CORE = 4  # learners in one machine's processes: more only wait for each other


@dataclass(frozen=True)
class EvaluationConfig:
    """When and how long the policy is evaluated, apart from training and with seeds of its own."""

    every_steps: int = 0
    """Environment steps between evaluations; 0: a tenth of the run."""
    episodes: int = 10
    """Episodes of each, once deterministic and once sampled; 0: no evaluation."""
    env_kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the environment that differ from training, such as the opponent in a game."""

    def __post_init__(self) -> None:
        """Refuse negative numbers."""
        _at_least("evaluation", self, every_steps=0, episodes=0)


@dataclass(frozen=True)
class CheckpointConfig:
    """When the run is saved; it always is at its end and when it is told to stop."""

    every_s: float = 60.0
    """Seconds between checkpoints; 0: not by time."""
    every_steps: int = 0
    """Environment steps between checkpoints; 0: not by steps."""
    keep: int = 3
    """How many are kept, besides the best."""
    replay: bool = True
    """Whether the replay memory is saved as well, so that a resumed run goes on exactly."""

    def __post_init__(self) -> None:
        """Refuse negative numbers, and to keep none."""
        _at_least("checkpoints", self, every_s=0, every_steps=0, keep=1)


@dataclass(frozen=True)
class LogConfig:
    """When a row of metrics is written."""

    every_s: float = 1.0
    """Seconds between rows; 0: not by time."""
    every_steps: int = 0
    """Environment steps between rows; 0: not by steps."""

    def __post_init__(self) -> None:
        """Refuse negative numbers."""
        _at_least("log", self, every_s=0, every_steps=0)


@dataclass(frozen=True)
class ScaleConfig:
    """How the parts of a topology with actors work together."""

    envs_per_actor: int | None = None
    """Environments of each actor; none: num_envs shared out among them."""
    learners: int = 1
    """Processes that learn, each from its share of every batch, and make every update together."""
    weights: Literal["auto", "sync", "async", "lag"] = "auto"
    """When actors get new weights: sync (everyone waits), async (newest on arrival), lag (when more than pull_lag
    versions behind); auto: sync for algorithms that need it, else async."""
    pull_lag: int = 0
    """Versions that an actor may be behind before it gets new weights, with weights=lag."""
    replay_shards: int = 0
    """Processes that keep the replay memory; 0: the learner keeps it."""
    min_actors: int = 1
    """With fewer actors the run waits for lost ones to come back."""
    max_restarts: int = 20
    """How often a part is started again before it is given up."""
    in_flight_mb: float = 256.0
    """Data on its way from the actors, at most."""

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        _at_least("scale", self, envs_per_actor=1, learners=1, pull_lag=0, replay_shards=0, min_actors=1)
        _at_least("scale", self, max_restarts=0, in_flight_mb=1)
        if self.pull_lag and self.weights != "lag":
            raise UserError(f"pull_lag={self.pull_lag} needs weights=lag.")


@dataclass(frozen=True)
class Experiment:
    """A run's settings. `algorithm` is the Config of the algorithm that `algo` names."""

    algo: str
    """Name of the algorithm."""
    env: str
    """Gymnasium id, `module:Class`, URL of external simulators, or `<name>` of a callable that only the process that
    made it can find."""
    env_kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the environment; of an Atari id: options of the Atari suite."""
    preset: str = "none"
    """Which preset the settings started from."""
    steps: int = 100_000
    """Environment steps of the whole run."""
    seed: int = 0
    """Root of all randomness."""
    num_envs: int = 8
    """Environments that are sampled at once."""
    backend: Literal["auto", "local", "process", "native", "ray"] = "auto"
    """How the environments run."""
    workers: int | None = None
    """Worker processes or threads of the environments; none: as the backend thinks best."""
    topology: Literal["sync", "actor_learner", "central_inference", "data_parallel"] = "sync"
    """How acting and learning are wired together."""
    runtime: Literal["auto", "inline", "process", "ray"] = "auto"
    """Where the parts of the topology live: threads, processes of this machine, or a Ray cluster."""
    actors: int | None = None
    """Parts that act, in topologies that have such; none: one per core but one. Those of data_parallel also learn."""
    scale: ScaleConfig = field(default_factory=ScaleConfig)
    sharing: SharingConfig = field(default_factory=SharingConfig)
    device: str = "auto"
    """Where the networks live: auto, cpu, cuda, cuda:1, mps."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Numbers to learn with; auto: the faster of both, measured."""
    threads: int | None = None
    """Threads of torch; none: one for small networks, all cores for images."""
    normalize_reward: bool = False
    """Scale rewards by the running deviation of the return."""
    algorithm: Any = None
    """Settings of the algorithm."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoints: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    factory: Any = field(default=None, repr=False, compare=False, metadata={"live": True})
    """The callable that `<name>` stands for, in the process that has it."""

    def __post_init__(self) -> None:
        """Refuse numbers that make no sense, and combinations that nothing can run."""
        _at_least("", self, steps=1, seed=0, num_envs=1, workers=1, actors=1, threads=1)
        if not _DEVICE.fullmatch(self.device):
            raise UserError(f"device must be auto, cpu, cuda, cuda:N or mps, got {self.device!r}.")
        if self.topology != "data_parallel" and self.sharing != SharingConfig():
            names = ", ".join(f.name for f in fields(SharingConfig) if getattr(self.sharing, f.name) != f.default)
            raise UserError(f"{names} is for learners that share: set topology=data_parallel.")
        if self.topology == "sync":
            self._check_sync()
        elif self.scale.min_actors > self.num_actors:
            raise UserError(f"min_actors={self.scale.min_actors} is more than there are actors: {self.num_actors}.")
        elif self.topology == "central_inference" and self.backend in ("local", "native"):
            raise UserError(
                f"central_inference acts for environments in parts of their own: backend={self.backend} cannot be; "
                "set another, or for algorithms that search topology=actor_learner."
            )
        elif self.scale.envs_per_actor is None and self.num_envs % self.num_actors:
            raise UserError(
                f"{self.num_envs} environments cannot be shared out among {self.num_actors} actors; "
                f"set num_envs to a multiple of {self.num_actors}, or envs_per_actor."
            )
        if self.topology == "data_parallel":
            self._check_sharing()

    def _check_sync(self) -> None:
        """Refuse what needs several parts."""
        if self.actors is not None:
            raise UserError("The topology 'sync' has no actors of its own: set num_envs, or topology=actor_learner.")
        if self.runtime in ("process", "ray"):
            raise UserError(f"The topology 'sync' is one process: runtime={self.runtime} needs another topology.")
        if self.scale != ScaleConfig():
            names = ", ".join(f.name for f in fields(ScaleConfig) if getattr(self.scale, f.name) != f.default)
            raise UserError(f"The topology 'sync' is one process: {names} needs topology=actor_learner.")

    def _check_sharing(self) -> None:
        """Refuse what learners that share cannot do."""
        given = [name for name in ("learners", "replay_shards", "pull_lag") if getattr(self.scale, name) !=
                 getattr(ScaleConfig, name)]  # fmt: skip
        if given or self.scale.weights != "auto":
            raise UserError(
                f"{given[0] if given else 'weights'} is not for data_parallel, where every worker learns: set actors, "
                "exchange, mode and lag."
            )
        if self.sharing.drop >= self.num_actors:
            raise UserError(f"drop={self.sharing.drop} would wait for none of {self.num_actors} workers.")
        most = _MAX_PER_CORE * cores()
        servers = self.sharing.servers if self.sharing.exchange == "param_server" else 0
        if self.runtime in ("auto", "process") and self.num_actors + max(0, servers - 1) > most:
            beside = f" and {servers} servers" if servers > 1 else ""
            raise UserError(
                f"{self.num_actors} workers{beside} are too many for the {cores()} cores of this machine: {most} "
                "are the most, or set runtime=ray with a cluster."
            )

    @classmethod
    def make(
        cls,
        algo: str,
        env: EnvLike | None = None,
        *,
        preset: str | None = None,
        config_file: str | Path | None = None,
        overrides: Mapping[str, Any] | None = None,
    ) -> Experiment:
        """An experiment from its defaults, the preset, a YAML file and `overrides`, the last of which wins.

        `overrides` are named as `corral.config.overrides` says: `lr`, `algorithm.lr`, `steps`, ... `preset` is the
        environment whose preset to take, or "none"; by default that of `env`, if there is one.
        """
        base = cls(algo=algo, env="", algorithm=find_algorithm(algo).config()())
        given = settings.read(base, overrides or {})
        from_file = {} if config_file is None else _read_file(base, Path(config_file))
        factory = None
        if env is not None:
            if "env" in given:
                raise UserError("env is set twice.")
            text, kwargs, factory = _describe_env(env)
            given["env"] = text
            if from_file.get("env", text) != text:
                from_file.pop("env_kwargs", None)  # they are the other environment's
            if kwargs and given.get("env_kwargs"):
                raise UserError(f"{text} has its options already; give them there instead of as env_kwargs.")
            given |= settings.read(base, {"env_kwargs": kwargs}) if kwargs else {}
        if {"num_envs", "scale.envs_per_actor"} <= given.keys():
            raise UserError("num_envs is the number of all environments, envs_per_actor that of each actor: set one.")
        said = from_file | given
        if not said.get("env"):
            raise UserError(f"{algo} needs an environment: say env, such as CartPole-v1.")
        if said.get("algo", algo) != algo:
            raise UserError(f"algo is set twice, to {algo} and {said['algo']}.")
        said["preset"] = _preset_name(algo, said["env"], preset or said.get("preset"))
        from_preset = settings.read(base, presets.settings(algo, said["preset"]))
        own = settings.read(base, find_algorithm(algo).settings)
        chosen = _without_misfits(own, said) | from_preset | said | {"factory": factory}
        if chosen.get("topology", base.topology) != "sync" and chosen.get("actors") is None:
            one_learns = chosen["topology"] != "data_parallel"
            chosen["actors"] = _sensible_actors(chosen.get("num_envs", base.num_envs), cores() - one_learns)
        made = settings.apply(base, chosen)
        made.environment()
        return made

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any], source: str = "") -> Experiment:
        """The experiment that `to_dict` described; `source` names the file in messages."""
        algo = plain.get("algo")
        if not isinstance(algo, str):
            raise UserError(f"{source or 'The settings'} must say which algorithm: algo.")
        base = cls(algo=algo, env="", algorithm=find_algorithm(algo).config()())
        return settings.apply(base, settings.read(base, plain, source))

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain values, fit for YAML and JSON."""
        return settings.to_plain(self)

    @property
    def guarded(self) -> bool:
        """Whether the learner lives in a process of its own, which another replaces when it is lost."""
        return self.topology != "sync" and self.runtime != "inline"

    @property
    def num_actors(self) -> int:
        """Parts that act."""
        return self.actors or 1

    @property
    def envs_per_actor(self) -> int:
        """Environments of each actor."""
        return self.scale.envs_per_actor or self.num_envs // self.num_actors

    @property
    def total_envs(self) -> int:
        """Environments of the whole run."""
        return self.num_envs if self.topology == "sync" else self.num_actors * self.envs_per_actor

    @property
    def evaluate_every(self) -> int:
        """Environment steps between evaluations."""
        return self.evaluation.every_steps or max(1, self.steps // _EVALUATIONS)

    def environment(self) -> tuple[EnvLike, dict[str, Any]]:
        """What to give to `make_vec`: the environment and its keyword arguments; UserError when there is none.

        An Atari id stands for the standard Atari stack.
        """
        from corral.envs import suites
        from corral.envs.backends.simulators.options import check_options, is_url
        from corral.envs.resolve import resolve
        from corral.envs.suites.atari import is_atari_id

        if self.factory is not None:
            return self.factory, self.env_kwargs
        if self.env.startswith("<"):
            raise UserError(
                f"The environment of this run is {self.env}, a callable without an importable name, which cannot be "
                "built again here; train with module:Class to resume, evaluate or record."
            )
        if is_atari_id(self.env):
            return suites.atari(self.env, **self.env_kwargs), {}
        if self.env == _PIXELS:
            try:
                return suites.pixels(**self.env_kwargs), {}
            except TypeError as error:
                raise UserError(f"{self.env}: {error}.") from error
        if is_url(self.env):
            check_options(self.env, self.env_kwargs)
        else:
            resolve(self.env, self.env_kwargs)
        return self.env, self.env_kwargs

    def default_run_dir(self, root: str | Path = "runs") -> Path:
        """The first folder of the name `root/algo-env-seed-n` that does not exist."""
        env = re.sub(r"[^\w.-]+", "-", self._short_env()).strip("-")
        number = 1
        while (path := Path(root) / f"{self.algo}-{env}-{self.seed}-{number}").exists():
            number += 1
        return path

    def _short_env(self) -> str:
        """For a folder's name: of external simulators, the program if it is known, or else where they are."""
        from corral.envs.backends.simulators.options import is_url

        if not is_url(self.env):
            return self.env.rpartition(":")[2]
        program = str(self.env_kwargs.get("sim", "")).split()[:1]
        return Path(program[0]).name if program else self.env


def _read_file(base: Experiment, path: Path) -> dict[str, Any]:
    """Settings from a YAML file, by full name; a `config.yaml` of another run is such a file."""
    given = read_config(path)
    if given.get("algo", base.algo) != base.algo:
        raise UserError(f"{path} is for {given['algo']}, not for {base.algo}.")
    return settings.read(base, given, str(path))


def _without_misfits(own: dict[str, Any], said: Mapping[str, Any]) -> dict[str, Any]:
    """An algorithm's own settings, without those that make no sense with what the user chose."""
    both = own | dict(said)
    exchange, kept = both.get("sharing.exchange", "all_reduce"), dict(own)
    if "sharing.exchange" in said and exchange == "all_reduce":
        kept.pop("sharing.mode", None)
    if exchange != "gossip":
        kept.pop("sharing.graph", None)
    if (kept | dict(said)).get("sharing.mode") != "lag":
        kept.pop("sharing.lag", None)
    if "://" in str(said.get("env", "")):  # simulators run where they are
        kept.pop("backend", None)
    return kept


def _preset_name(algo: str, env: str, wanted: str | None) -> str:
    """The preset to use: the wanted one, or that of the environment; "none" when there is none."""
    if wanted is None:
        return presets.find(algo, env) or "none"
    if wanted != "none" and (algo, wanted) not in presets.PRESETS:
        names = [name for owner, name in presets.PRESETS if owner == algo]
        close = difflib.get_close_matches(wanted, names, 1, 0.5)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join([*names, 'none'])}."
        raise UserError(f"{algo} has no preset {wanted!r}; {hint}")
    return wanted


def _describe_env(env: EnvLike) -> tuple[str, dict[str, Any], Any]:
    """Text and keyword arguments that `environment` builds it from, and the callable itself where they cannot."""
    from corral.envs.resolve import resolve
    from corral.envs.suites.atari import AtariSuite
    from corral.envs.suites.pixels import PixelSuite

    if isinstance(env, str):
        return env, {}, None
    name = resolve(env).name
    if isinstance(env, AtariSuite):
        return f"ALE/{env.name}-v5", _options(env, but="game"), None
    if isinstance(env, PixelSuite):
        inner, kwargs, live = _describe_env(env.env)
        if live is None and not kwargs:
            return _PIXELS, _options(env, but="env") | {"env": inner}, None
        return f"<{name}>", {}, env
    module, own_name = getattr(env, "__module__", None), getattr(env, "__name__", "")
    if module not in (None, "__main__") and getattr(sys.modules.get(module), own_name, None) is env:
        return f"{module}:{own_name}", {}, None
    return f"<{name.strip('<>')}>", {}, env


def _options(suite: Any, but: str) -> dict[str, Any]:
    """Fields of a suite that are not as by default."""
    return {key: value for key, value in vars(suite).items() if value != getattr(type(suite), key, {}) and key != but}


def _sensible_actors(num_envs: int, free: int) -> int:
    """As many as there are cores free, as far as the environments can be shared out evenly."""
    return max(count for count in range(1, max(1, free) + 1) if num_envs % count == 0)


def _at_least(group: str, config: Any, **bounds: float) -> None:
    for name, least in bounds.items():
        value = getattr(config, name)
        if value is not None and value < least:
            full = f"{group}.{name}" if group else name
            raise UserError(f"{full} must be at least {least}, got {value}.")
