"""The algorithms by name. Listing them imports none."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from corral.core.errors import UserError


@dataclass(frozen=True)
class AlgorithmEntry:
    """Where an algorithm is defined, and what it does."""

    module: str
    class_name: str
    summary: str
    actions: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings that differ from the defaults: some names stand for an algorithm in a certain topology."""

    def load(self) -> Any:
        return getattr(importlib.import_module(self.module), self.class_name)

    def config(self) -> Any:
        return importlib.import_module(self.module).Config


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


def find_algorithm(name: str) -> AlgorithmEntry:
    """The algorithm of that name, or a user's `module:Class`; UserError with the closest name if unknown.

    The module of a user's algorithm defines its settings as `Config`.
    """
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    module, colon, class_name = str(name).partition(":")
    if colon:
        own = AlgorithmEntry(module, class_name, "your own", "")
        try:
            found, _ = own.load(), own.config()
        except (ImportError, AttributeError, ValueError) as error:
            raise UserError(f"No algorithm {name!r}: {error}; its module must define the class and a Config.") from None
        from corral.algos.base import Algorithm

        if not (isinstance(found, type) and issubclass(found, Algorithm)):
            raise UserError(f"{name} is not an algorithm: name a subclass of corral.algos.base.Algorithm.")
        return own
    close = difflib.get_close_matches(str(name).lower(), ALGORITHMS, 1, 0.5)
    hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(ALGORITHMS)}."
    raise UserError(f"No algorithm {name!r}; {hint}")
