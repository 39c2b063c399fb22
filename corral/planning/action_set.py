"""The edges of a node: every action where actions can be enumerated, otherwise sampled actions."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from functools import partial

import numpy as np

from corral.core.errors import UserError
from corral.core.jit import compiled
from corral.core.spaces import Layout
from corral.core.types import Array, Tree
from corral.ops.distributions import Actions, JointChoices

NO_EDGE = -1.0  # prior of an edge that does not exist


@partial(compiled, nogil=True)
def legal_softmax(logits: Array, legal: Array, out: Array) -> None:
    """Softmax over the legal entries of each row, 0 if all their logits are -inf; NO_EDGE for the others."""
    for i in range(legal.shape[0]):
        top = -math.inf
        for a in range(legal.shape[1]):
            if legal[i, a]:
                top = max(top, float(logits[i, a]))
        whole = 0.0
        for a in range(legal.shape[1]):
            weight = math.exp(float(logits[i, a]) - top) if legal[i, a] and top > -math.inf else 0.0
            out[i, a] = weight
            whole += weight
        for a in range(legal.shape[1]):
            if not legal[i, a]:
                out[i, a] = NO_EDGE
            elif whole > 0:
                out[i, a] /= whole


_MAX_EDGES = 256  # combinations of several choices; one choice may have more


class ActionSet(ABC):
    """The edges of a node. A model's action is a row of numbers, as in `Actions`."""

    width: int

    @abstractmethod
    def offer(self, params: Array, legal: Array, rng: np.random.Generator) -> tuple[Array, Array | None]:
        """Priors [B, width] from policy parameters, and the actions of the edges, None if these never change."""

    @abstractmethod
    def uniform(self, legal: Array, rng: np.random.Generator) -> tuple[Array, Array | None]:
        """The same for a uniform policy."""

    @abstractmethod
    def to_env(self, edges: Array) -> Tree: ...

    @abstractmethod
    def to_model(self, edges: Array) -> Array:
        """Model actions [n, D]."""

    @abstractmethod
    def random_env_actions(self, count: int, rng: np.random.Generator) -> Tree:
        """Uniformly random environment actions."""


class Choices(ActionSet):
    """One edge per action; with several discrete choices, one per combination."""

    def __init__(self, layout: Layout):
        self._joint = JointChoices(layout, "A search")
        self._actions = Actions(layout)
        self.width = self._joint.count

    def offer(self, params: Array, legal: Array, rng: np.random.Generator) -> tuple[Array, Array | None]:
        logits = self._joint_logits(params) if len(self._actions.sizes) > 1 else params
        priors = np.empty(legal.shape, np.float32)
        legal_softmax(logits, legal, priors)
        return priors, None

    def uniform(self, legal: Array, rng: np.random.Generator) -> tuple[Array, Array | None]:
        return self.offer(np.zeros((len(legal), self._actions.num_logits), np.float32), legal, rng)

    def to_env(self, edges: Array) -> Tree:
        return self._joint.to_env(edges)

    def to_model(self, edges: Array) -> Array:
        return np.stack(np.unravel_index(edges, self._actions.sizes), -1).astype(np.float32)

    def random_env_actions(self, count: int, rng: np.random.Generator) -> Tree:
        return self.to_env(rng.integers(self.width, size=count))

    def _joint_logits(self, params: Array) -> Array:
        """Logits of every combination, the last choice varying fastest."""
        at, joint = 0, np.zeros((len(params), 1), params.dtype)
        for size in self._actions.sizes:
            part = params[:, at : at + size]
            part = part - np.logaddexp.reduce(part, axis=1, keepdims=True)
            joint = (joint[:, :, None] + part[:, None, :]).reshape(len(params), -1)
            at += size
        return joint


class Samples(ActionSet):
    """Edges are actions sampled per node from the policy.

    All have equal priors (Hubert et al. 2021 with temperature 1). With `likeliest`, the first is the mode of the
    policy: for play only, since a policy trained on it would narrow.
    """

    def __init__(self, layout: Layout, count: int, *, likeliest: bool):
        if count < 2:
            raise UserError(f"num_sampled_actions must be at least 2, got {count}.")
        self._actions, self.width, self._likeliest = Actions(layout), count, likeliest

    def offer(self, params: Array, legal: Array, rng: np.random.Generator) -> tuple[Array, Array | None]:
        drawn, _ = self._actions.sample(np.repeat(params, self.width, axis=0), rng)
        rows = drawn.reshape(len(params), self.width, -1)
        if self._likeliest:
            rows[:, 0] = self._actions.mode(params)
        return self._equal(len(params)), rows

    def uniform(self, legal: Array, rng: np.random.Generator) -> tuple[Array, Array | None]:
        """Uniform samples from the space, or normal ones if it is unbounded."""
        count = len(legal)
        return self._equal(count), self._even(count * self.width, rng).reshape(count, self.width, -1)

    def to_env(self, edges: Array) -> Tree:
        return self._actions.to_env(edges)

    def to_model(self, edges: Array) -> Array:
        return edges

    def random_env_actions(self, count: int, rng: np.random.Generator) -> Tree:
        return self.to_env(self._even(count, rng))

    def _equal(self, count: int) -> Array:
        return np.full((count, self.width), 1.0 / self.width, np.float32)

    def _even(self, count: int, rng: np.random.Generator) -> Array:
        actions = self._actions
        choices = [rng.integers(size, size=count) for size in actions.sizes]
        even = rng.uniform(-1, 1, (count, actions.num_numbers))
        normal = rng.standard_normal((count, actions.num_numbers))
        numbers = np.where(actions.bounded, even, normal) if actions.num_numbers else even
        return np.concatenate([np.stack(choices, 1) if choices else even[:, :0], numbers], 1).astype(np.float32)


def choose_action_set(layout: Layout, samples: int, *, likeliest: bool = True) -> ActionSet:
    """Every action if there are few enough to enumerate, otherwise `samples` of them."""
    actions = Actions(layout)
    countable = actions.discrete and (len(actions.sizes) == 1 or np.prod(actions.sizes) <= _MAX_EDGES)
    return Choices(layout) if countable else Samples(layout, samples, likeliest=likeliest)
