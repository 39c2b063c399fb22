"""The algorithms by name. Listing them imports none."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from corral.core.errors import UserError
from corral.core.imports import import_named

_MUST_DEFINE = "its module must define the class and a Config."


@dataclass(frozen=True)
class AlgorithmEntry:
    """Where an algorithm is defined, and what it does."""

    module: str
    class_name: str
    summary: str
    actions: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings that differ from the defaults: some names stand for an algorithm in a certain topology."""
    given: Any = None
    """The class, where it was given itself."""

    def load(self) -> Any:
        return self.given or getattr(import_named(self.module), self.class_name)

    def config(self) -> Any:
        try:
            return import_named(self.module).Config
        except AttributeError as error:
            raise UserError(f"No algorithm {self.class_name!r}: {error}; {_MUST_DEFINE}") from None


_ALL = "discrete, multi-discrete, continuous, hybrid"
_SMALL_DISCRETE = "discrete, multi-discrete with few combinations"
_ACTOR_LEARNER = {"topology": "actor_learner"}
_DATA_PARALLEL = {"topology": "data_parallel"}
ALGORITHMS = {
    "reinforce": AlgorithmEntry("corral.algos.reinforce", "Reinforce", "policy gradient over whole episodes", _ALL),
    "a2c": AlgorithmEntry("corral.algos.a2c", "A2c", "advantage actor-critic, one update per short batch", _ALL),
    "ppo": AlgorithmEntry("corral.algos.ppo", "Ppo", "clipped policy updates, several epochs per batch", _ALL),
    "ppo-search": AlgorithmEntry(
        "corral.algos.search.ppo_search", "PpoSearch", "ppo that also learns from tree search on saved states", _ALL,
        {"backend": "local"},
    ),
    "alphazero": AlgorithmEntry(
        "corral.algos.search.alphazero", "AlphaZero", "self-play with tree search, from which the network learns",
        "discrete", {"backend": "local", "num_envs": 64},
    ),
    "impala": AlgorithmEntry(
        "corral.algos.impala", "Impala", "actor-critic on stale data, corrected by V-trace", _ALL, _ACTOR_LEARNER
    ),
    "appo": AlgorithmEntry(
        "corral.algos.appo", "Appo", "clipped policy updates on stale data, with V-trace", _ALL, _ACTOR_LEARNER
    ),
    "dqn": AlgorithmEntry(
        "corral.algos.dqn", "Dqn", "Q-learning with replay: double, dueling, n-step, prioritized", _SMALL_DISCRETE
    ),
    "apex": AlgorithmEntry(
        "corral.algos.dqn", "Dqn", "Ape-X: dqn with actors and a different epsilon per environment", _SMALL_DISCRETE,
        _ACTOR_LEARNER
        | {"prioritized_replay": True, "n_step": 3, "dueling": True, "epsilon_ladder": True, "max_grad_norm": 40.0},
    ),
    "seed_impala": AlgorithmEntry(
        "corral.algos.impala", "Impala", "SEED: impala with central inference", _ALL,
        {"topology": "central_inference"},
    ),
    "dppo": AlgorithmEntry(
        "corral.algos.ppo", "Ppo", "distributed PPO: workers that average every gradient", _ALL, _DATA_PARALLEL
    ),
    "ppo-ssp": AlgorithmEntry(
        "corral.algos.ppo", "Ppo", "stale synchronous PPO: workers a few updates apart, with a parameter server", _ALL,
        _DATA_PARALLEL | {"exchange": "param_server", "mode": "ssp:3"},
    ),
    "a3c": AlgorithmEntry(
        "corral.algos.a2c", "A2c", "A3C: a2c in asynchronous workers, with a parameter server", _ALL,
        _DATA_PARALLEL | {"exchange": "param_server", "mode": "async"},
    ),
    "gala": AlgorithmEntry(
        "corral.algos.a2c", "A2c", "GALA: a2c in workers that gossip with a neighbour", _ALL,
        _DATA_PARALLEL | {"exchange": "gossip", "mode": "async", "gossip_graph": "ring"},
    ),
    "paac": AlgorithmEntry(
        "corral.algos.a2c", "A2c", "PAAC: a2c with one learner and many environments in worker processes", _ALL,
        {"backend": "process", "num_envs": 32},
    ),
}  # fmt: skip


_CONTINUOUS = "for continuous actions there is ppo"
_ELSEWHERE = {
    **dict.fromkeys(("sac", "td3", "ddpg", "tqc", "crossq", "droq", "redq", "cql"), _CONTINUOUS),
    **dict.fromkeys(("c51", "iqn", "qrdqn", "pqn"), "for discrete actions there is dqn"),
    "rainbow": "there is dqn, with --set prioritized_replay=true dueling=true n_step=3",
    **dict.fromkeys(("ddqn", "doubledqn"), "there is dqn, which is double by default"),
    "duelingdqn": "there is dqn, with --set dueling=true",
    **dict.fromkeys(("recurrentppo", "ppolstm", "ppornn"), "there is ppo, with --set rnn=lstm"),
    "r2d2": "there is impala, with --set rnn=lstm",
    "trpo": "there is ppo, its successor",
    "muzero": "there is alphazero, which searches in the environment instead of a learned model",
    **dict.fromkeys(("dreamer", "dreamerv2", "dreamerv3"), "there are ppo, and dqn for discrete actions"),
    "maskableppo": "masks are honoured by alphazero",
    **dict.fromkeys(("ddppo", "distributedppo"), "there is dppo"), "apexdqn": "there is apex",
    **dict.fromkeys(("seed", "seedrl"), "there is seed_impala"),
}  # fmt: skip
"""Algorithms of other libraries, in lower case without separators -> what there is here instead."""


def describe_algorithm(algo: str | type[Any]) -> tuple[str, type[Any] | None]:
    """The name of an algorithm, and the class itself if other programs cannot import it by that name."""
    if not isinstance(algo, type):
        return algo, None
    module, name = algo.__module__, algo.__name__
    for known, entry in ALGORITHMS.items():
        if (entry.module, entry.class_name) == (module, name):
            return known, None
    if getattr(sys.modules.get(module), name, None) is not algo:
        return f"<{name}>", algo
    return f"{module}:{name}", algo if module == "__main__" else None


def find_algorithm(name: str, given: type[Any] | None = None) -> AlgorithmEntry:
    """The algorithm of that name, or a user's `module:Class`; UserError with the closest name if unknown.

    The module of a user's algorithm defines its settings as `Config`. A `given` class need not be importable.
    """
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    module, colon, class_name = str(name).partition(":")
    if given is not None:
        return _own(name, AlgorithmEntry(given.__module__, given.__name__, "your own", "", given=given))
    if module.startswith("<") or (module == "__main__" and not hasattr(sys.modules[module], class_name)):
        raise UserError(
            f"The algorithm of this run is {name}, a class of the script that trained it: move it and its Config into "
            "a module, and write module:Class as algo in the run's config.yaml."
        )
    if colon:
        return _own(name, AlgorithmEntry(module, class_name, "your own", ""))
    known = _ELSEWHERE.get(re.sub(r"[^a-z0-9]", "", str(name).lower()))
    if known is not None:
        raise UserError(f"{name} is not in this version; {known}: `corral list algos` lists all.")
    close = difflib.get_close_matches(str(name).lower(), ALGORITHMS, 1, 0.5)
    hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(ALGORITHMS)}."
    raise UserError(f"No algorithm {name!r}; {hint}")


def _own(name: str, entry: AlgorithmEntry) -> AlgorithmEntry:
    """A user's algorithm, if it is one."""
    try:
        found = entry.load()
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"No algorithm {name!r}: {error}; {_MUST_DEFINE}") from None
    from corral.algos.base import Algorithm

    if not (isinstance(found, type) and issubclass(found, Algorithm)):
        raise UserError(f"{name} is not an algorithm: name a subclass of corral.algos.base.Algorithm.")
    if entry.given is None:  # a class of a script comes to other processes without the rest of its module
        entry.config()
    return entry
