"""Settings of a tree search."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from corral.core.errors import UserError


@dataclass(frozen=True)
class SearchConfig:
    """Settings of a tree search."""

    root_selection: Literal["gumbel", "puct"] = "gumbel"
    """gumbel: sequential halving, sound from 2 simulations on; puct: visit counts, with Dirichlet noise."""
    leaves_in_flight: int = 4
    """Simulations of a tree that run at once; 1 is the sequential search."""
    num_sampled_actions: int = 16
    """Sampled actions of a node, where the action space is continuous or too large to enumerate."""
    progressive_widening: bool = False
    """With puct: start nodes with few sampled actions and add more with their visits. Has no effect where actions are
    enumerated."""
    max_num_considered_actions: int = 16
    """With gumbel: maximum number of actions considered at the root."""
    c_visit: float = 50.0
    """With gumbel: offset of the visit count in the weight of values."""
    c_scale: float = 0.1
    """With gumbel: weight of values relative to priors."""
    value_resolution: float | None = None
    """With gumbel: value differences below this fraction of the values (in two-player games, of a win) are scaled down,
    because they are likely errors of the critic. 0: never, as published; none: 0.05, and 1 in two-player games."""
    c_init: float = 1.25
    """With puct: weight of priors relative to values."""
    dirichlet_alpha: float = 0.3
    """With puct: concentration of the Dirichlet noise in the root's priors."""
    dirichlet_fraction: float = 0.25
    """With puct: fraction of the noise in the root's priors."""
    reuse_tree: bool = False
    """Start a search from the subtree below the action that was taken, where it is known."""
    memory_mb: float = 1024.0
    """Maximum memory for saved states."""

    def __post_init__(self) -> None:
        require_whole("leaves_in_flight", self.leaves_in_flight, 1)
        require_whole("max_num_considered_actions", self.max_num_considered_actions, 1)
        require_whole("num_sampled_actions", self.num_sampled_actions, 2)
        if not self.memory_mb > 0:
            raise UserError(f"memory_mb must be above 0, got {self.memory_mb}.")
        if self.root_selection not in ("gumbel", "puct"):
            raise UserError(f"root_selection={self.root_selection!r} is not one of gumbel, puct.")
        if self.progressive_widening and self.root_selection != "puct":
            raise UserError("progressive_widening needs root_selection=puct: gumbel samples all actions at once.")
        if not 0 <= self.dirichlet_fraction <= 1 or not 0 < self.dirichlet_alpha < np.inf:
            raise UserError("dirichlet_fraction must be between 0 and 1, and dirichlet_alpha above 0.")
        for name in ("c_visit", "c_scale", "c_init", "value_resolution"):  # below 0 a search would prefer worse actions
            given = getattr(self, name)
            if given is not None and not 0 <= given < np.inf:
                raise UserError(f"{name} must be a number of at least 0, got {given}.")


def require_whole(name: str, value: object, least: int) -> None:
    """UserError unless a setting is an integer of at least `least`."""
    if not isinstance(value, (int, np.integer)) or value < least:
        raise UserError(f"{name} must be an integer of at least {least}, got {value!r}.")


def require_sims(sims: int) -> None:
    """UserError unless this is a valid number of simulations."""
    if not isinstance(sims, (int, np.integer)) or isinstance(sims, bool):
        raise UserError(f"sims must be an integer number of simulations, such as 50, got {sims!r}.")
    if sims < 1:
        raise UserError(f"A search needs at least 1 simulation, got {sims}: raise sims, or play without search.")
