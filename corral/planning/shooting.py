"""Planners without a tree: random shooting, and MPPI for continuous actions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces as gs

from corral.acting.model_policy import params_and_values
from corral.acting.policy import ActContext, to_numpy
from corral.core.errors import UserError
from corral.core.spaces import Layout
from corral.core.types import Array, Tree, tree_map
from corral.envs.vec_env import VecEnv
from corral.nets.actor_critic import ActorCritic
from corral.planning.action_set import ActionSet, choose_action_set
from corral.planning.config import require_whole
from corral.planning.planner import known_scale
from corral.snapshot.states import Rollouts, States

Values = Callable[[Tree], Array]


def values_by(source: ActorCritic | Callable[[Tree], Tree]) -> Values:
    """Observations [B, ...] -> values [B]."""
    if isinstance(source, ActorCritic):
        if source.recurrent:
            raise UserError("MPPI evaluates single states, and this value function is recurrent: train with rnn=none.")
        return lambda obs: params_and_values(source, obs)[1].astype(np.float64)
    if not callable(source):
        raise UserError(
            f"{source!r} cannot be used as `value`: pass a function of observations, or a policy trained by Corral."
        )
    return lambda obs: np.asarray(to_numpy(source(obs)), np.float64).reshape(-1)


def roll_out(
    states: States, env_ids: Array, actions: Tree, copies: int, discount: float, rng: np.random.Generator
) -> tuple[Rollouts, Array]:
    """Try action sequences [n * copies, T, ...] from the current states of `n` environments.

    Returns the rollouts and their discounted returns, -inf where a step failed, because the return is unknown.
    """
    roots = states.save(env_ids)
    try:
        parents = np.repeat(roots, copies)
        found = states.rollout(parents, actions, rng.integers(1, 2**63, len(parents), np.uint64))
    finally:
        states.drop(roots)
    returns: Array = found.reward @ discount ** np.arange(found.reward.shape[1])
    if found.faulty is not None:
        returns[found.faulty] = -np.inf
    return found, returns


class Shooting:
    """Takes the first action of the best of `sims` random rollouts of `horizon` steps: a baseline for planners."""

    def __init__(self, sims: int = 50, horizon: int = 20, *, discount: float = 0.99, seed: int = 0):
        require_whole("sims", sims, 1)
        require_whole("horizon", horizon, 1)
        if not 0 <= discount <= 1:
            raise UserError(f"discount must be between 0 and 1, got {discount}.")
        self._sims, self._horizon, self._discount = sims, horizon, discount
        self._rng = np.random.default_rng(seed)
        self.simulator_steps = 0
        self._parts: tuple[States, ActionSet] | None = None

    def set_context(self, ctx: ActContext) -> None:
        """Shooting uses no learned values."""

    def bind_envs(self, vec: VecEnv) -> None:
        self.close()
        states = vec.states()
        if states.players > 1:
            states.close()
            raise UserError("Shooting is for single-player environments: use corral.Search for games.")
        self._parts = states, choose_action_set(states.spec.action, 2)

    def close(self) -> None:
        if self._parts is not None:
            self._parts[0].close()
            self._parts = None

    def initial_state(self, n: int) -> Tree:
        return np.arange(n)

    def act(self, obs: Tree, state: Tree, first: Array) -> tuple[Tree, Tree, dict[str, Any]]:
        if self._parts is None:
            raise UserError("Shooting needs environments to plan from: pass it to corral.Sampler.")
        states, actions = self._parts
        n, sims, horizon = len(state), self._sims, self._horizon
        drawn = actions.random_env_actions(n * sims * horizon, self._rng)
        shaped = tree_map(lambda leaf: leaf.reshape(n * sims, horizon, *leaf.shape[1:]), drawn)
        found, returns = roll_out(states, state, shaped, sims, self._discount, self._rng)
        self.simulator_steps += int(found.length.sum())
        best = returns.reshape(n, sims).argmax(1) + sims * np.arange(n)
        return tree_map(lambda leaf: leaf[best, 0], shaped), state, {}


Model = Callable[[Tree, Tree], tuple[Tree, Array, Array]]
"""Observations [B, ...] and actions [B, ...] -> next observations, rewards [B], and whether the episode ended [B]."""


class Mppi:
    """MPPI: sampling-based control for continuous bounded actions; needs no training.

    Williams et al. 2017, "Information Theoretic MPC for Model-Based Reinforcement Learning": `samples` noisy copies of
    a plan are simulated from the current state, and their noise is averaged with weights exp(return / temperature). The
    first action of the new plan is taken; the rest starts the next plan.

    Args:
        horizon: steps of a plan.
        samples: noisy copies per action.
        temperature: in the unit of returns; the lower, the more the best copies dominate.
        noise: standard deviation, one or one per action dimension, or their covariance; default: a quarter of each
            range.
        smoothness: correlation of the noise of consecutive steps, 0 <= smoothness < 1.
        discount: of future rewards.
        value: value of the observation at the end of a plan: a function, or a policy trained by Corral.
        model: simulates plans, instead of the environments' states.
        seed: of the noise.
    """

    def __init__(  # noqa: PLR0913 - what a plan is made by
        self,
        horizon: int = 20,
        samples: int = 32,
        temperature: float = 1.0,
        noise: float | Sequence[float] | Array | None = None,
        *,
        smoothness: float = 0.7,
        discount: float = 1.0,
        value: Any = None,
        model: Model | None = None,
        seed: int = 0,
    ):
        require_whole("horizon", horizon, 1)
        require_whole("samples", samples, 2)
        if not 0 <= discount <= 1:
            raise UserError(f"discount must be between 0 and 1, got {discount}.")
        if not temperature > 0 or not 0 <= smoothness < 1:
            raise UserError(f"temperature must be above 0 and 0 <= smoothness < 1, got {temperature} and {smoothness}.")
        self.horizon, self.samples, self.temperature = horizon, samples, temperature
        self._noise, self._smoothness, self._discount = noise, smoothness, discount
        self._value: Values | None = None if value is None else values_by(value)
        self._model, self._rng = model, np.random.default_rng(seed)
        self._states: States | None = None
        self._reward_scale: float | None = 1.0  # of the rewards that `value` was trained on
        self.simulator_steps = 0
        self._box: _Box | None = None

    def set_context(self, ctx: ActContext) -> None:
        self._reward_scale = ctx.reward_scale

    def bind_envs(self, vec: VecEnv) -> None:
        self.close()
        self._box = _Box(vec.spec.action, self._noise)
        if self._model is None:
            self._states = vec.states()

    def close(self) -> None:
        if self._states is not None:
            self._states.close()
            self._states = None

    def initial_state(self, n: int) -> Tree:
        """Indices of the environments, and plans at the centre of the action range."""
        box = self._bound_box()
        return {"env": np.arange(n), "plan": np.tile(box.middle, (n, self.horizon, 1))}

    def act(self, obs: Tree, state: Tree, first: Array) -> tuple[Tree, Tree, dict[str, Any]]:
        box = self._bound_box()
        plan = np.where(first[:, None, None], box.middle, state["plan"])
        tried = box.clip(plan[:, None] + self._draw(len(plan), box.factor))
        if self._states is None:
            returns = self._imagine(obs, tried)
        else:
            returns = self._try_out(state["env"], tried, self._states)
        plan = plan + average(tried - plan[:, None], returns, self.temperature)
        plan = box.clip(plan)  # rounding may exceed the bounds
        after = np.concatenate([plan[:, 1:], plan[:, -1:]], axis=1)
        return box.to_env(plan[:, 0]), {"env": state["env"], "plan": after}, {}

    def _draw(self, n: int, factor: Array) -> Array:
        """Noise [n, samples, horizon, D], correlated over steps, each step with the same covariance."""
        white = self._rng.standard_normal((n, self.samples, self.horizon, len(factor)))
        noise = white @ factor.T
        keep, fresh = self._smoothness, np.sqrt(1 - self._smoothness**2)
        for t in range(1, self.horizon if keep else 0):
            noise[:, :, t] = keep * noise[:, :, t - 1] + fresh * noise[:, :, t]
        return noise

    def _try_out(self, env_ids: Array, tried: Array, states: States) -> Array:
        """Returns [n, samples] of plans [n, samples, horizon, D] from the states of environments."""
        actions = self._bound_box().to_env(tried.reshape(-1, self.horizon, tried.shape[-1]))
        found, returns = roll_out(states, env_ids, actions, self.samples, self._discount, self._rng)
        self.simulator_steps += int(found.length.sum())
        if self._value is not None:
            values = self._discount**found.length * self._worth(found.obs, len(returns))
            returns += np.where(found.terminated, 0.0, values)
        return returns.reshape(tried.shape[:2])

    def _imagine(self, obs: Tree, tried: Array) -> Array:
        """The same with the model, from observations."""
        assert self._model is not None
        n, box = len(tried), self._bound_box()
        obs = tree_map(lambda leaf: np.repeat(leaf, self.samples, axis=0), obs)
        tried = tried.reshape(n * self.samples, self.horizon, -1)
        returns, going = np.zeros(len(tried)), np.ones(len(tried))
        for t in range(self.horizon):
            obs, reward, over = self._model(obs, box.to_env(tried[:, t]))
            _require_finite(to_numpy(reward), "`model`")
            returns += self._discount**t * going * to_numpy(reward)
            going *= ~np.asarray(to_numpy(over), np.bool_)
        if self._value is not None:
            returns += self._discount**self.horizon * going * self._worth(obs, len(tried))
        return returns.reshape(n, self.samples)

    def _worth(self, obs: Tree, count: int) -> Array:
        """Values of `count` observations, in unscaled rewards."""
        assert self._value is not None
        worth: Array = self._value(obs) / known_scale(self._reward_scale)
        if len(worth) != count:
            raise UserError(f"`value` returned {len(worth)} values for {count} observations: return one for each.")
        _require_finite(worth, "`value`")
        return worth

    def _bound_box(self) -> _Box:
        if self._box is None:
            raise UserError("MPPI needs environments to plan for: pass it to corral.Sampler, or call bind_envs(vec).")
        return self._box


def average(noise: Array, returns: Array, temperature: float) -> Array:
    """Noise [n, samples, ...] averaged with weights softmax(returns / temperature); equal weights if all are -inf."""
    best = returns.max(1, keepdims=True)
    weights = np.exp(np.where(best > -np.inf, returns - np.maximum(best, np.finfo(float).min), 0.0) / temperature)
    weights /= weights.sum(1, keepdims=True)
    summed: Array = np.einsum("nk,nk...->n...", weights, noise)
    return summed


def _require_finite(numbers: Array, source: str) -> None:
    if not np.isfinite(numbers).all():
        raise UserError(f"{source} returned NaN or infinity; MPPI needs finite returns to weight its plans.")


class _Box:
    """Action components as a flat row, within their bounds."""

    def __init__(self, layout: Layout, noise: float | Sequence[float] | Array | None):
        self._layout = layout
        for leaf in layout.leaves:
            if not isinstance(leaf.space, gs.Box) or leaf.dtype.kind != "f":
                raise UserError(
                    f"MPPI needs continuous actions, and '{leaf.name}' is {leaf.space}: use corral.Search instead."
                )
        spaces: list[Any] = [leaf.space for leaf in layout.leaves]
        self._low, self._high = (
            np.concatenate([getattr(space, side).reshape(-1) for space in spaces]).astype(np.float64)
            for side in ("low", "high")
        )
        if not (np.isfinite(self._low).all() and np.isfinite(self._high).all()):
            raise UserError("MPPI needs bounded actions: give every Box of the action space a finite low and high.")
        self.middle = (self._low + self._high) / 2
        self.factor = self._read_noise(noise)

    def clip(self, actions: Array) -> Array:
        return np.minimum(np.maximum(actions, self._low), self._high)

    def to_env(self, actions: Array) -> Tree:
        leaves, at = [], 0
        for leaf in self._layout.leaves:
            size = int(np.prod(leaf.shape))
            part = actions[..., at : at + size].reshape(*actions.shape[:-1], *leaf.shape)
            leaves.append(part.astype(leaf.dtype))
            at += size
        return self._layout.unflatten(leaves)

    def _read_noise(self, noise: float | Sequence[float] | Array | None) -> Array:
        """The factor that turns independent noise into noise of this covariance."""
        size = len(self.middle)
        given = (self._high - self._low) / 4 if noise is None else np.asarray(noise, np.float64)
        if given.shape not in ((), (size,), (size, size)):
            raise UserError(
                f"noise of shape {given.shape} does not fit {size} action dimensions: pass one standard deviation, one "
                "per dimension, or a covariance matrix."
            )
        if given.ndim < 2:
            if not (given > 0).all():
                raise UserError(f"Standard deviations in `noise` must be above 0, got {noise}.")
            return np.diag(np.broadcast_to(given, (size,)))
        try:
            factor: Array = np.linalg.cholesky(given)
        except np.linalg.LinAlgError:
            raise UserError("The covariance passed as `noise` must be symmetric and positive definite.") from None
        return factor
