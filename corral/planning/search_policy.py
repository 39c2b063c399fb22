"""`Search`: a planner as a Policy, which searches from the current states of environments.

```python
vec = corral.make_vec("CartPole-v1", num_envs=8, backend="local")
with corral.Sampler(vec, corral.Search(vec, corral.load_policy("runs/x"), sims=50)) as sampler:
    ...
```
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import gymnasium
import numpy as np

from corral.acting.policy import ActContext
from corral.core.errors import UserError
from corral.core.types import Array, Tree, tree_map
from corral.envs.resolve import EnvLike, resolve
from corral.envs.vec_env import VecEnv
from corral.planning.action_set import choose_action_set
from corral.planning.config import SearchConfig, require_sims
from corral.planning.planner import Planner, known_scale, make_evaluation
from corral.planning.snapshots import Snapshots
from corral.planning.stand_in import stand_in_states
from corral.snapshot.states import States


class Search:
    """Selects actions by Monte Carlo tree search on the real environment, by saving and restoring its states.

    Args:
        env: environment to search from. A VecEnv, `Snapshots`, or an environment that you step yourself; or an id,
            `module:Class` or factory, if the search is used by a `Sampler` or an evaluation, which have the
            environments. If theirs is a different one, the search uses `env` as its stand-in. None: uses the
            environments of the `Sampler` or evaluation.
        policy: evaluates leaves: the result of `corral.load_policy`, a function `logits, values = fn(observations)`, a
            `Policy` for rollouts, or None for random rollouts.
        sims: simulations per action.
        discount: default: 1 for two players; otherwise the `gamma` that the policy was trained with, or 0.99.
        temperature: 0 takes the best action, 1 samples from the search's policy.
        noise: 1 explores at the root, 0 plays best.
        rollout_steps: length of rollouts from leaves, without a network.
        transfer: with a stand-in: returns the state that it takes from the live environment; default: the live one's
            `get_key_state()` or `state_dict()`.
        seed: seed of the search's RNG.
        how: further settings, see `SearchConfig`.
    """

    def __init__(  # noqa: PLR0913 - what to search, with what, and how
        self,
        env: EnvLike | VecEnv | Snapshots | States | gymnasium.Env[Any, Any] | None,
        policy: Any = None,
        sims: int = 50,
        *,
        discount: float | None = None,
        temperature: float = 0.0,
        noise: float = 0.0,
        rollout_steps: int = 50,
        transfer: Callable[[gymnasium.Env[Any, Any]], Any] | None = None,
        seed: int = 0,
        **how: Any,
    ):
        require_sims(sims)
        odd = sorted(set(how) - {f.name for f in fields(SearchConfig)})
        if odd:
            raise UserError(
                f"A search has no setting {odd[0]!r}; valid: {', '.join(f.name for f in fields(SearchConfig))}."
            )
        if not temperature >= 0 or not 0 <= noise <= 1:
            raise UserError(f"temperature must be at least 0 and noise between 0 and 1, got {temperature} and {noise}.")
        if discount is not None and not 0 <= discount <= 1:
            raise UserError(f"discount must be between 0 and 1, got {discount}.")
        if rollout_steps < 1:
            raise UserError(f"rollout_steps must be at least 1, got {rollout_steps}.")
        self.config, self.sims, self._env, self._policy = SearchConfig(**how), sims, env, policy
        self._discount, self._temperature, self._noise = discount, temperature, noise
        self._rollout_steps, self._transfer, self._rng = rollout_steps, transfer, np.random.default_rng(seed)
        self._planner: Planner | None = None
        self._last: Tree = None  # the last selected action
        self._reward_scale: float | None = getattr(policy, "reward_scale", 1.0)
        if isinstance(env, gymnasium.Env):
            env = self._env = Snapshots(env, memory_mb=self.config.memory_mb)
        if isinstance(env, Snapshots):
            self._look_ahead_in(env.states, env.num_envs)
        elif isinstance(env, States):
            self._look_ahead_in(env, 1)
        elif isinstance(env, VecEnv):
            self.bind_envs(env)

    @classmethod
    def of_model(
        cls,
        model: Any,
        sims: int,
        discount: float,
        config: SearchConfig,
        rng: np.random.Generator,
        *,
        deterministic: bool = True,
    ) -> Search:
        """A search with a network or a loaded policy, with the settings of its training."""
        how = {f.name: getattr(config, f.name) for f in fields(config)}
        made = cls(None, model, sims, discount=discount, temperature=float(not deterministic), **how)
        made._rng = rng
        return made

    def set_context(self, ctx: ActContext) -> None:
        self._reward_scale = ctx.reward_scale

    def bind_envs(self, vec: VecEnv) -> None:
        ready = self._env
        if isinstance(ready, (Snapshots, States)) or (isinstance(ready, VecEnv) and ready is not vec):
            if getattr(ready, "env", None) is not vec:
                raise UserError("This search is bound to other environments: create one for those that it acts in.")
            return
        self.close()
        memory = self.config.memory_mb
        if ready is None or isinstance(ready, VecEnv):
            states: States = vec.states(memory)
        else:
            assert isinstance(ready, str) or callable(ready)
            same = self._transfer is None and resolve(ready).name == vec.spec.name
            states = vec.states(memory) if same else stand_in_states(ready, vec, self._transfer, memory)
        self._look_ahead_in(states, vec.num_envs)

    def close(self) -> None:
        if self._planner is not None:
            self._planner.states.close()
            self._planner = None

    def initial_state(self, n: int) -> Tree:
        return np.arange(n)

    def act(self, obs: Tree, state: Tree, first: Array) -> tuple[Tree, Tree, dict[str, Any]]:
        planner = self.planner
        plan = planner.plan(state, first, noise=self._noise, reward_scale=known_scale(self._reward_scale))
        edges = plan.best
        if self._temperature > 0:
            edges = draw(sharpened(plan.policy, self._temperature), self._rng)
            planner.set_taken(state, edges)
        return planner.actions.to_env(plan.to_action_rows(edges)), state, {"search_value": plan.values}

    def __call__(self, obs: Tree = None) -> Tree:
        """The action for the single environment; `obs` may be omitted if it was stepped since the search was made."""
        own = self._env if isinstance(self._env, Snapshots) else None
        if obs is not None and own is not None:
            own.set_obs(obs)
        # If other steps were taken, the subtree below the last action belongs to other states, even if they look alike.
        other = own is not None and (self._last is None or not own.stepped_only_with(self._last))
        actions, _, _ = self.act(obs, np.arange(1), np.full(1, other))
        action: Tree = tree_map(lambda leaf: leaf[0], actions)
        if own is not None:
            self._last = action
            own.mark()
        return action

    @property
    def simulator_steps(self) -> int:
        return 0 if self._planner is None else self._planner.simulator_steps

    @property
    def planner(self) -> Planner:
        """The planner; UserError before there are environments."""
        if self._planner is None:
            raise UserError(
                "This search has no environments to search from: pass it to corral.Sampler, or make it with a VecEnv, "
                "Snapshots or an environment."
            )
        return self._planner

    def _look_ahead_in(self, states: States, num_envs: int) -> None:
        actions = choose_action_set(states.spec.action, self.config.num_sampled_actions)
        discount = self._discount
        if discount is None:
            trained = getattr(getattr(self._policy, "experiment", None), "algorithm", None)
            discount = getattr(trained, "gamma", 0.99) if states.players == 1 else 1.0
        evaluate = make_evaluation(self._policy, states, actions, self._rollout_steps, discount, self._rng)
        self._planner = Planner(
            states, actions, evaluate, self.config, num_envs, self.sims, discount=discount, rng=self._rng
        )


def sharpened(policy: Array, temperature: float) -> Array:
    """Probabilities to the power 1 / temperature, normalized per row; towards 0 the maximum takes all."""
    with np.errstate(divide="ignore"):
        logits = np.log(policy) / max(temperature, 1e-6)
    weights = np.exp(logits - logits.max(1, keepdims=True))
    return np.asarray(weights / weights.sum(1, keepdims=True))


def draw(policy: Array, rng: np.random.Generator) -> Array:
    """Sample one column per row."""
    bounds = policy.cumsum(1)
    return np.asarray((rng.random((len(policy), 1)) * bounds[:, -1:] >= bounds).sum(1).clip(max=policy.shape[1] - 1))
