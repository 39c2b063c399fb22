"""`load_policy`: a trained policy as a function of observations, without its environment."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from corral.acting.policy import ActContext, PlanningPolicy, Policy, set_context
from corral.config.experiment import Experiment
from corral.config.trust import is_trusted, remember, untrusted_env
from corral.core.errors import UserError
from corral.core.spaces import Leaf
from corral.core.types import Array, EnvSpec, Tree, tree_map
from corral.nets.network import use_precision
from corral.runs.checkpoints import checkpoint
from corral.runs.folder import RunFolder

if TYPE_CHECKING:
    import torch

    from corral.algos.base import Algorithm


def load_policy(run_dir: str | Path, which: str = "best", *, seed: int = 0, device: str = "cpu") -> LoadedPolicy:
    """Load the policy of a run from its files alone: neither Ray nor the environment is imported.

    Args:
        run_dir: a run directory, or one of its checkpoints.
        which: `best`, `latest`, or a checkpoint's name; a run without a best one gives its latest.
        seed: of sampled actions.
        device: of the network: cpu, cuda, mps, auto, or run for the run's setting.
    """
    folder, which = find_checkpoint(Path(run_dir), which)
    weights, meta = checkpoint.load(folder, which, only=checkpoint.POLICY)
    experiment = stored_experiment(folder)
    return LoadedPolicy(experiment, weights, meta, seed=seed, device=device)


class LoadedPolicy:
    """`action = policy(obs)` for one observation or a batch, in the environment's formats.

    Includes observation preprocessing and action bounds. A recurrent policy keeps its state between calls; `reset`
    clears it, and `first` marks rows that begin a new episode.
    """

    def __init__(
        self, experiment: Experiment, weights: dict[str, Any], meta: dict[str, Any], *, seed: int, device: str
    ):
        from corral.topologies.base import make_algorithm

        self.experiment = experiment
        self.spec = EnvSpec.from_json(meta["spec"])  # spaces of the environment that it was trained on
        self.step: int = meta["step"]  # environment steps when the checkpoint was written
        self.evaluation: dict[str, Any] | None = meta["evaluation"]  # the run's last one before that
        self.reward_scale: float | None = meta.get("reward_scale", None if experiment.normalize_reward else 1.0)
        """Factor between unscaled rewards and those that it was trained on; None if that was not saved."""
        self.algo = make_algorithm(experiment, self.spec)
        self.model = _build_model(self.algo, weights, experiment.device if device == "run" else device)
        self.model.eval().requires_grad_(False)
        use_precision(self.model, meta["precision"])  # the learner's, so that actions are equal bit for bit
        self._actors = {greedy: self.alone(deterministic=greedy, seed=seed) for greedy in (True, False)}
        self._state: Tree = None
        self._rows = 0

    def __call__(self, obs: Tree, deterministic: bool = True, *, first: Any = None) -> Tree:
        """Actions for one observation or for rows; `first` marks starts of episodes, default: the first call."""
        leaves, single = self._read(obs)
        n = len(leaves[0])
        actor = self._actors[bool(deterministic)]
        begins = self._begin(actor, n, first)
        action, self._state, _ = actor.act(self.spec.observation.unflatten(leaves), self._state, begins)
        return tree_map(lambda leaf: leaf[0], action) if single else action

    def reset(self) -> None:
        """Forget all episodes; the next call may have another number of rows."""
        self._state, self._rows = None, 0

    @property
    def recurrent(self) -> bool:
        return self._actors[True].initial_state(1) is not None

    def as_policy(self, *, deterministic: bool = True, seed: int = 0) -> Policy:
        """The same actions as a `Policy`, e.g. for a `Sampler`; the caller holds the recurrent state."""
        policy = self.algo.eval_policy(self.model, deterministic=deterministic, rng=np.random.default_rng(seed))
        set_context(policy, ActContext(min(1.0, self.step / self.experiment.steps), reward_scale=self.reward_scale))
        return policy

    def search_policy(self, sims: int, *, deterministic: bool = True, seed: int = 0) -> Policy:
        """A search that evaluates states with this policy."""
        from corral.planning.config import SearchConfig
        from corral.planning.search_policy import Search

        settings = self.experiment.algorithm
        config, rng = getattr(settings, "search", SearchConfig()), np.random.default_rng(seed)
        return Search.of_model(self, sims, getattr(settings, "gamma", 0.99), config, rng, deterministic=deterministic)

    def alone(self, *, deterministic: bool = True, seed: int = 0) -> Policy:
        """The policy without search: the network selects actions from observations alone."""
        policy = self.as_policy(deterministic=deterministic, seed=seed)
        if not isinstance(policy, PlanningPolicy):
            return policy
        from corral.acting.model_policy import ActorCriticPolicy
        from corral.nets.actor_critic import ActorCritic

        assert isinstance(self.model, ActorCritic)
        return ActorCriticPolicy(self.model, not deterministic, np.random.default_rng(seed))

    def use_training_threads(self) -> None:
        """Use as many torch threads as in training, so that results are equal bit for bit."""
        from corral.learn.threads import choose_threads, set_threads

        set_threads(choose_threads(self.experiment.torch_threads, self.model).number)

    def _begin(self, actor: Policy, n: int, first: Any) -> Array:
        """Check the number of rows, make recurrent state for them, and return which begin an episode."""
        if not self._rows:
            self._state, begins = actor.initial_state(n), np.ones(n, bool)
        else:
            begins = np.zeros(n, bool)
        if self._state is not None and self._rows not in (0, n):
            raise UserError(
                f"This recurrent policy has the state of {self._rows} rows but got {n}: call reset() first, or load "
                "a separate policy."
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
        """Leaves of the observations as rows, and whether it was a single observation."""
        layout = self.spec.observation
        try:
            flat = layout.flatten(obs)
            values = [np.asarray(value.detach().cpu() if hasattr(value, "detach") else value) for value in flat]
        except (KeyError, IndexError, TypeError, ValueError):
            raise UserError(f"The observation does not have the structure of {layout.space}.") from None
        batched = [_is_batch(leaf, value) for leaf, value in zip(layout.leaves, values, strict=True)]
        rows = [value if many else value[None] for value, many in zip(values, batched, strict=True)]
        if len(set(batched)) > 1 or len({len(value) for value in rows}) > 1 or not len(rows[0]):
            counts = {leaf.name: value.shape for leaf, value in zip(layout.leaves, values, strict=True)}
            raise UserError(f"All leaves must have the same number of rows, at least 1, got shapes {counts}.")
        return [_checked(leaf, value) for leaf, value in zip(layout.leaves, rows, strict=True)], not batched[0]


def _build_model(algo: Algorithm, weights: dict[str, Any], device: str) -> torch.nn.Module:
    """The network with these weights, built without initialization, which takes seconds for images."""
    import torch

    from corral.learn.device import find_device, use_channels_last

    with torch.device("meta"):
        model = algo.build_model()
    try:
        model.load_state_dict(weights, assign=True)
    except RuntimeError as error:
        raise UserError(
            "The checkpoint's weights do not fit the network that the run's config.yaml describes "
            f"({str(error).splitlines()[1].strip()}): restore that file."
        ) from error
    model = model.to(find_device(device, model))
    use_channels_last(model)
    return model


def stored_experiment(folder: RunFolder) -> Experiment:
    """The settings of a run; UserError if they name code that is not trusted here (see `trust`)."""
    untrusted = untrusted_env(folder.path, folder.config, folder.info.get("proof"))
    return replace(Experiment.from_dict(folder.config, str(folder.path / "config.yaml")), untrusted=untrusted)


def trust(run: str | Path) -> None:
    """Trust the code and commands that this run names, from now on, on this machine."""
    folder = find_checkpoint(Path(run), "latest")[0]
    if not is_trusted(folder.path, folder.config, folder.info.get("proof")):
        remember(folder.config)


def find_checkpoint(path: Path, which: str) -> tuple[RunFolder, str]:
    """The run and the name of a checkpoint, from the path of either."""
    points = path.is_file() and path.parent.name == "checkpoints"  # `best` and `latest`, where there are no links
    if points or (path / checkpoint.MANIFEST).exists():
        path = path.absolute()
        if path.parent.name != "checkpoints" or not (path.parents[1] / "config.yaml").exists():
            raise UserError(f"{path} is a checkpoint without the settings of its run: copy the whole run directory.")
        return RunFolder.open(path.parents[1]), path.name
    folder = RunFolder.open(path)
    return folder, "latest" if which == "best" and not (folder.checkpoints / "best").exists() else which


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
    """Rows converted to the dtype of the leaf; UserError if they do not fit."""
    if not leaf.takes(rows):
        raise UserError(
            f"observation leaf '{leaf.name}' has dtype {rows.dtype}, expected {leaf.dtype}: give observations as the "
            "environment returns them; the policy scales them itself."
        )
    rows = np.ascontiguousarray(rows, leaf.dtype)
    if leaf.dtype.kind == "f":
        if np.isnan(rows).any():
            raise UserError(f"observation leaf '{leaf.name}' is NaN.")
    elif leaf.is_discrete and not leaf.in_range(rows):
        raise UserError(f"observation leaf '{leaf.name}' has values outside {leaf.space}.")
    return rows
