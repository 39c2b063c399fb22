"""Presets: settings that fit an algorithm to an environment, and the evidence for them.

`presets/<algorithm>.yaml` has a block per environment: `settings`, `status`, `evidence` of a verified one (seeds,
score, steps, wall time), and `origin`. Most numbers start from rl-baselines3-zoo (`hyperparams/*.yml`) and CleanRL, in
Corral's terms: a minibatch of 64 from 16 x 256 steps is `num_minibatches` 64, a linear schedule is `anneal_lr` or
`clip_coef` 0.2:0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from corral.algos.registry import ALGORITHMS
from corral.config.yaml_file import read_yaml

_FOLDER = Path(__file__).with_suffix("")


@dataclass(frozen=True)
class Preset:
    """One block of a file."""

    settings: Mapping[str, Any]
    status: Literal["untested", "verified"]
    origin: str
    evidence: str = ""

    @property
    def note(self) -> str:
        return f"{self.evidence}; {self.origin}" if self.evidence else self.origin


ATARI = "atari"  # the preset of every Atari game


@cache
def presets_of(algo: str) -> Mapping[str, Preset]:
    """The presets of an algorithm, by environment."""
    path = _FOLDER / f"{algo}.yaml"
    return {env: Preset(**block) for env, block in read_yaml(path).items()} if path.exists() else {}


def all_presets() -> dict[tuple[str, str], Preset]:
    """(algorithm, environment) -> preset."""
    return {(algo, env): preset for algo in ALGORITHMS for env, preset in presets_of(algo).items()}


def find(algo: str, env: str) -> str | None:
    """Name of the preset of this algorithm for an environment, or None."""
    from corral.envs.suites.atari import is_atari_id

    name = ATARI if is_atari_id(env) else env
    return name if name in presets_of(algo) else None


def settings(algo: str, name: str) -> Mapping[str, Any]:
    """Settings of a preset; empty for "none"."""
    return {} if name == "none" else presets_of(algo)[name].settings


def describe(algo: str, name: str, steps: int) -> str:
    """A preset and its status; it is verified only for at least the steps that it was verified with.

    A preset of another version's run may no longer exist.
    """
    if name == "none":
        return "no preset"
    preset = presets_of(algo).get(name)
    if preset is None:
        return f"preset {name}, unknown"
    needed = preset.settings.get("steps", 0)
    if preset.status == "verified" and steps < needed:
        return f"preset {name}, untested with less than {needed:,} steps"
    return f"preset {name}, {preset.status}"


def verified(algo: str) -> list[str]:
    """Names of the verified presets of an algorithm."""
    return [name for name, preset in presets_of(algo).items() if preset.status == "verified"]
