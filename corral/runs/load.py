"""`load_policy`: a trained policy as a function of observations, without its environment."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces as gs

from corral.acting.policy import ActContext, PlanningPolicy, Policy, set_context
from corral.config.experiment import Experiment
from corral.core.errors import UserError
from corral.core.spaces import Leaf
from corral.core.types import Array, EnvSpec, Tree, tree_map
from corral.nets.network import use_precision
from corral.runs import checkpoint
from corral.runs.folder import RunFolder

if TYPE_CHECKING:
    import torch

    from corral.algos.base import Algorithm


def load_policy(run_dir: str | Path, which: str = "best", *, seed: int = 0, device: str = "cpu") -> LoadedPolicy:
    """The policy of a run, from its files alone: neither Ray nor the environment is imported.

    Args:
        run_dir: a run directory, or one of its checkpoints.
        which: `best`, `latest`, or the name of a checkpoint; a run that has no best one yet gives its latest.
        seed: of what it draws when it is not deterministic.
        device: where the network goes: cpu, cuda, mps, auto, or run, as the run was set to.
    """
    folder, which = _find(Path(run_dir), which)
    weights, meta = checkpoint.load(folder, which, only=checkpoint.POLICY)
    experiment = Experiment.from_dict(folder.config, str(folder.path / "config.yaml"))
    return LoadedPolicy(experiment, weights, meta, seed=seed, device=device)


class LoadedPolicy:
    """`action = policy(obs)` for one observation or a batch of them, as the environment gives and takes them.

    What prepares observations and bounds actions is inside. A policy with memory keeps it between calls; `reset`
    forgets everything, and `first` says which rows begin a new episode.
    """

    def __init__(
        self, experiment: Experiment, weights: dict[str, Any], meta: dict[str, Any], *, seed: int, device: str
    ):
        from corral.learn.device import find_device
        from corral.topologies.base import make_algorithm

        self.experiment = experiment
        self.spec = EnvSpec.from_json(meta["spec"])
        """The spaces of the environment that it was trained on."""
        self.step: int = meta["step"]
        """Environment steps of the run when the checkpoint was written."""
        self.evaluation: dict[str, Any] | None = meta["evaluation"]
        """What the run's last evaluation before that gave."""
        self.reward_scale: float | None = meta.get("reward_scale", None if experiment.normalize_reward else 1.0)
        """What the rewards that it has learned from were of the game's own; None where that was not saved."""
        self.algo = make_algorithm(experiment, self.spec)
        self.model = _build_model(self.algo, weights, find_device(experiment.device if device == "run" else device))
        self.model.eval().requires_grad_(False)
        use_precision(self.model, meta["precision"])  # the learner's, so that actions are the same to the last bit
        self._actors = {greedy: self.alone(deterministic=greedy, seed=seed) for greedy in (True, False)}
        self._state: Tree = None
        self._rows = 0

    def __call__(self, obs: Tree, deterministic: bool = True, *, first: Any = None) -> Tree:
        """Actions for observations: one for one, rows for rows.

        `first` says which rows begin an episode; without it, those of the first call do.
        """
        leaves, single = self._read(obs)
        n = len(leaves[0])
        actor = self._actors[bool(deterministic)]
        begins = self._begin(actor, n, first)
        action, self._state, _ = actor.act(self.spec.observation.unflatten(leaves), self._state, begins)
        return tree_map(lambda leaf: leaf[0], action) if single else action

    def reset(self) -> None:
        """Forget all episodes; the next call may bring another number of rows."""
        self._state, self._rows = None, 0

    @property
    def recurrent(self) -> bool:
        """Whether it has a memory."""
        return self._actors[True].initial_state(1) is not None

    def as_policy(self, *, deterministic: bool = True, seed: int = 0) -> Policy:
        """The same decisions as a `Policy`, whose memory is the caller's, such as for a `Sampler`."""
        policy = self.algo.eval_policy(self.model, deterministic=deterministic, rng=np.random.default_rng(seed))
        set_context(policy, ActContext(min(1.0, self.step / self.experiment.steps), reward_scale=self.reward_scale))
        return policy

    def search_policy(self, sims: int, *, deterministic: bool = True, seed: int = 0) -> Policy:
        """A search that judges states by this policy, whatever it was trained for."""
        from corral.planning.planner import SearchConfig
        from corral.planning.search_policy import Search

        settings = self.experiment.algorithm
        config, rng = getattr(settings, "search", SearchConfig()), np.random.default_rng(seed)
        return Search.of_model(self, sims, getattr(settings, "gamma", 0.99), config, rng, deterministic=deterministic)

    def alone(self, *, deterministic: bool = True, seed: int = 0) -> Policy:
        """What decides by observations alone: the network, where the policy would search."""
        policy = self.as_policy(deterministic=deterministic, seed=seed)
        if not isinstance(policy, PlanningPolicy):
            return policy
        from corral.acting.model_policy import ActorCriticPolicy
        from corral.nets.actor_critic import ActorCritic

        assert isinstance(self.model, ActorCritic)
        return ActorCriticPolicy(self.model, not deterministic, np.random.default_rng(seed))

    def use_training_threads(self) -> None:
        """Let torch compute with as many threads as in training, so that results are the same to the last bit."""
        from corral.learn.device import set_threads

        set_threads(self.experiment.torch_threads, self.model)

    def _begin(self, actor: Policy, n: int, first: Any) -> Array:
        """Check the number of rows, make memory for them, and say which of them begin an episode."""
        if not self._rows:
            self._state, begins = actor.initial_state(n), np.ones(n, bool)
        else:
            begins = np.zeros(n, bool)
        if self._state is not None and self._rows not in (0, n):
            raise UserError(
                f"This policy has a memory of {self._rows} rows and got {n}: call reset() first, or load one for each."
            )
        self._rows = n
        if first is None:
            return begins
        given = np.asarray(first)
        if given.dtype != bool or given.shape not in ((), (n,)):
            raise UserError(f"first must be true or false for each of the {n} rows, got {first!r}.")
        result: Array = begins | given
        return result

    def _read(self, obs: Tree) -> tuple[list[Array], bool]:
        """Leaves of the observations as rows, and whether it was a single one."""
        layout = self.spec.observation
        try:
            values = [_to_array(value) for value in layout.flatten(obs)]
        except (KeyError, IndexError, TypeError, ValueError):
            raise UserError(f"The observation does not have the structure of {layout.space}.") from None
        batched = [_is_batch(leaf, value) for leaf, value in zip(layout.leaves, values, strict=True)]
        rows = [value if many else value[None] for value, many in zip(values, batched, strict=True)]
        if len(set(batched)) > 1 or len({len(value) for value in rows}) > 1 or not len(rows[0]):
            counts = {leaf.name: value.shape for leaf, value in zip(layout.leaves, values, strict=True)}
            raise UserError(f"The observation must have one row in each leaf, or as many in each, got shapes {counts}.")
        return [_checked(leaf, value) for leaf, value in zip(layout.leaves, rows, strict=True)], not batched[0]


def _build_model(algo: Algorithm, weights: dict[str, Any], device: torch.device) -> torch.nn.Module:
    """The network with these weights. It is made without any, since drawing them takes seconds for images."""
    import torch

    from corral.learn.device import lay_out

    with torch.device("meta"):
        model = algo.build_model()
    try:
        model.load_state_dict(weights, assign=True)
    except RuntimeError as error:
        raise UserError(
            "The checkpoint's weights do not fit the network that the run's config.yaml describes "
            f"({str(error).splitlines()[1].strip()}): restore that file."
        ) from error
    model = model.to(device)
    lay_out(model)
    return model


def _find(path: Path, which: str) -> tuple[RunFolder, str]:
    """The run and the name of a checkpoint, from the path of either."""
    if (path / "manifest.json").exists():
        path = path.absolute()
        if path.parent.name != "checkpoints" or not (path.parents[1] / "config.yaml").exists():
            raise UserError(f"{path} is a checkpoint without its run, which has the settings: copy the run as a whole.")
        return RunFolder.open(path.parents[1]), path.name
    folder = RunFolder.open(path)
    return folder, "latest" if which == "best" and not (folder.checkpoints / "best").exists() else which


def _to_array(value: Any) -> Array:
    array: Array = value.detach().cpu().numpy() if hasattr(value, "detach") else np.asarray(value)
    return array


def _is_batch(leaf: Leaf, value: Array) -> bool:
    if value.shape == leaf.shape:
        return False
    if value.shape[1:] == leaf.shape and value.ndim:
        return True
    raise UserError(
        f"observation leaf '{leaf.name}' has shape {value.shape}, expected {leaf.shape}, or {('n', *leaf.shape)} "
        "for n at once.".replace("'n'", "n")
    )


def _checked(leaf: Leaf, rows: Array) -> Array:
    """Rows in the dtype of the leaf; UserError where they are not what it can hold."""
    if not leaf.takes(rows):
        raise UserError(
            f"observation leaf '{leaf.name}' has dtype {rows.dtype}, expected {leaf.dtype}: give observations as the "
            "environment does, they are scaled inside."
        )
    rows = np.ascontiguousarray(rows, leaf.dtype)
    if leaf.dtype.kind == "f":
        if np.isnan(rows).any():
            raise UserError(f"observation leaf '{leaf.name}' is NaN.")
    elif not isinstance(leaf.space, gs.Box) and not leaf.in_range(rows):
        raise UserError(f"observation leaf '{leaf.name}' has values outside {leaf.space}.")
    return rows
