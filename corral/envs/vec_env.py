"""The contract of every environment backend.

```python
batch = vec.recv()                                # first observations of all environments
while ...:
    vec.send(batch.env_ids, policy(batch.obs))
    batch = vec.recv(min_ready=vec.num_envs // 2)  # those that are ready first
```
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from corral.core import seeding
from corral.core.errors import UserError
from corral.core.types import Array, EnvSpec, StepBatch, Tree
from corral.envs.supervision import Fault, FaultLog

if TYPE_CHECKING:
    import gymnasium
    from gymnasium.vector import AutoresetMode
    from stable_baselines3.common.vec_env import VecEnv as Sb3VecEnv

    from corral.snapshot.states import States


class VecEnv(ABC):
    """Many environments at once.

    Each environment is either *idle* (it takes an action by `send`) or *in flight* (its result comes from `recv`). The
    first `recv` returns the first observations of all environments.

    - The rows of a batch are sorted by environment id (or ordered as in `env_ids`). The receiver owns its arrays; only
      `env_ids` is read-only.
    - `recv()` waits for every environment in flight; `recv(min_ready=k)` for at least `k` of them, and returns all that
      are ready; `recv(env_ids=ids)` for exactly those.
    - Every row is a step that happened, or a fault marked as such: no padding and no reset rows.
    """

    spec: EnvSpec
    num_envs: int
    seed: int = 0  # of the reset that the first `recv` makes if `reset` was not called
    backend_reason: str = ""  # the reason why `backend="auto"` chose this backend
    resolved_backend: tuple[str, int | None] | None = None  # backend and workers that `auto` chose
    gives_access: bool = False  # whether `apply` and `begin_episodes` work
    pipelined: bool = False  # whether environments step while the caller selects actions for others
    holds_back_rows: bool = False  # whether `recv()` may omit an environment until the others are sent to again
    _faults_seen = 0
    _log: FaultLog | None = None  # of backends that rebuild failed environments

    @abstractmethod
    def reset(self, seed: int = 0) -> None:
        """Start new seeded episodes everywhere and drop results in flight; first observations come from `recv`."""

    @abstractmethod
    def send(self, env_ids: Array, actions: Tree) -> None:
        """Send one action to each of these idle environments."""

    @abstractmethod
    def recv(self, min_ready: int | None = None, *, env_ids: Array | None = None) -> StepBatch:
        """Results of environments in flight."""

    continued: Array | None = None
    """[num_envs] bool: environments that cannot be reset, whose episode went on when they last were; None: none."""

    def linger(self, min_ready: int, timeout_s: float) -> bool:
        """Wait for `min_ready` results or until the time is up, so that `recv(min_ready=1)` returns larger batches;
        returns whether `recv(min_ready)` will not wait.
        """
        return True  # others step within `recv`

    @abstractmethod
    def close(self) -> None:
        """Stop everything. Safe to call twice."""

    def begin_episodes(
        self,
        env_ids: Array,
        seeds: int | Sequence[int | None],
        options: Sequence[Mapping[str, Any] | None],
    ) -> None:
        """Start a new episode in each of these environments, with its own seed (None: its RNG continues), or with those
        of `reset(seed)`, and with its `options` of `reset()`. None may be in flight. First observations come from
        `recv`; an exception ends this VecEnv.
        """
        raise UserError(
            f"{self._kind} resets all environments from one seed: a list of seeds, options and masks need "
            "backend='local' or 'process'."
        )

    def apply(
        self, function: Callable[[Any, Any], Any], values: Iterable[Any] = (), env_ids: Array | None = None
    ) -> list[Any]:
        """`function(env, value)` for each of these environments (default: all), called where it lives; returns the
        results. Nothing may be in flight. Function, values and results are pickled on backends with workers. What it
        changes in an environment is lost when that one fails and is rebuilt; it must neither step nor reset it.
        """
        raise UserError(
            f"{self._kind} does not give access to its environments, so nothing can be called, read, set or rendered "
            "there: use backend='local' or 'process'."
        )

    def keep_infos(self, names: Sequence[str]) -> None:
        """From now on put these values of the environments' infos into batches; before the first `recv`."""
        raise UserError(
            f"{self._kind} does not transmit infos, so make_vec(info=...) cannot be used: put {', '.join(names)} into "
            "the observation, or use backend='local' or 'process'."
        )

    @property
    def _kind(self) -> str:
        return f"{type(self).__name__} of {self.spec.name}"

    def record_episodes(self) -> None:  # noqa: B027 - where nothing can be restored, nothing is recorded
        """From now on record what `state_dict` needs to restore environments in the middle of their episodes.

        Call it before the first `recv`. It costs less than a microsecond per step, and memory for at most 50,000
        actions per environment.
        """

    def state_dict(self) -> dict[str, Any]:
        """State for `load_state_dict`. No result may be in flight or waiting to be received."""
        return {"seed": self.seed}

    def load_state_dict(self, state: dict[str, Any]) -> list[int]:
        """Bring new environments to a saved state; returns the ids where that failed.

        A restored environment is idle: send it the action for the observation delivered last. The others start a new
        episode, whose first observation comes from `recv`. By default all do, with a new seed; `local` and `process`
        replay the recorded actions and compare (see `corral.envs.stepping.recorder`), which may draw from this
        process's global RNGs.
        """
        self.seed = seeding.env_seed(state["seed"], "train", 0, 1)
        self.reset(self.seed)
        return list(range(self.num_envs))

    def states(self, memory_mb: float = 1024.0) -> States:
        """The states of these environments by env id, for planners; UserError if they cannot be saved."""
        raise UserError(
            f"A search saves and restores environments, which {type(self).__name__} does not support for "
            f"{self.spec.name}: set backend=local; to use more cores, run several actors."
        )

    @property
    def faults(self) -> Iterable[Fault]:
        return () if self._log is None else tuple(self._log.recent)

    @property
    def restarts(self) -> int:
        return 0 if self._log is None else self._log.restarts

    def new_faults(self) -> list[str]:
        """A line for each fault since the last call; of very many, the last ones."""
        count, self._faults_seen = self.restarts - self._faults_seen, self.restarts
        return [fault.line for fault in [*self.faults][-count:] if fault.kind != "neighbour"] if count else []

    @property
    def shows_masks(self) -> bool:
        """Whether observations have a leaf `action_mask`, or an info of a reset had one."""
        return any(leaf.path[-1:] == ("action_mask",) for leaf in self.spec.observation.leaves)

    @property
    def reward_scale(self) -> float:
        """Factor that the consumer multiplies rewards by; 1 unless they are to be normalised after sampling."""
        return 1.0

    @property
    def learning_scale(self) -> float:
        """Current ratio of training rewards to unscaled rewards."""
        return 1.0

    def as_gymnasium(self, autoreset: str | AutoresetMode = "same_step") -> gymnasium.vector.VectorEnv[Any, Any, Any]:
        """The same environments behind Gymnasium's vector interface. `autoreset` is "same_step" (the default),
        "next_step" (that of Gymnasium's own vector environments, which its observation wrappers need), "disabled", or
        a `gymnasium.vector.AutoresetMode`. A VecEnv made from a Gymnasium vector environment returns that one, in its
        own mode.
        """
        from corral.envs.adapters.as_gymnasium import make_gymnasium_env

        self._require_full_batches()
        return make_gymnasium_env(self, autoreset)

    def as_sb3(self) -> Sb3VecEnv:
        from corral.envs.adapters.as_sb3 import make_sb3_vec_env

        self._require_full_batches()
        return make_sb3_vec_env(self)

    def _require_full_batches(self) -> None:
        if self.holds_back_rows:
            raise UserError(
                f"{self.spec.name} uses next-step autoreset, so recv() does not return all rows together: build it "
                "with autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP."
            )

    def __enter__(self) -> VecEnv:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
