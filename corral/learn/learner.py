"""The learner: batches in, weights out. One class for all algorithms and topologies."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from corral.acting.model_policy import read_tensors
from corral.algos.base import Algorithm, ParamGroup, UpdateContext
from corral.algos.trajectories import Minibatch
from corral.core.errors import RunFailed, UserError
from corral.core.types import LossOutput, Positions, Sample, Trajectory, Transitions, tree_map
from corral.learn.device import Precision
from corral.learn.exchange.base import Exchange, GradAction
from corral.learn.fast import fast_entry, find_fast_loss
from corral.learn.weights import FlatParams, GroupSlice
from corral.nets.network import Network, use_precision
from corral.nets.obs_norm import ObsNorm, merged

_MAX_BAD_IN_A_ROW = 10


class Learner:
    """Owns a network's weights, their optimizers, and the target network.

    An update whose loss or gradient is not finite is skipped: the weights do not change, `report` is called with the
    likely cause, and too many skipped updates in a row end the run.
    """

    def __init__(
        self,
        algo: Algorithm,
        model: nn.Module,
        generator: torch.Generator,
        precision: Precision,
        exchange: Exchange | None = None,
        report: Callable[[str], None] = lambda text: None,
    ):
        self.algo, self.model, self._generator, self.precision = algo, model, generator, precision
        self._exchange = exchange or Exchange()
        self._report = report
        self.device = next(model.parameters()).device
        groups = algo.groups()
        self.flat = FlatParams(model, groups)
        self.target = copy.deepcopy(model).requires_grad_(False) if algo.uses_target else None
        use_precision(model, precision.name)  # weights and gradients have their final place in memory now
        if self.target is not None:
            use_precision(self.target, precision.name)
        self._fast_loss = find_fast_loss(algo, model, self.target)
        entry = fast_entry(algo)
        if isinstance(model, Network) and (entry is None or entry.towers):
            model.learn_in_numpy()
        self._groups = {
            group.name: _Group(k, group, flat_slice)
            for k, (group, flat_slice) in enumerate(zip(groups, self.flat.groups, strict=True))
        }
        self.version = 0
        """Updates so far."""
        self.skipped = 0
        """Updates skipped because they were not finite."""
        self._bad_in_a_row = 0
        self._counts_inserts = algo.data.reuse == "replay" or algo.data.replayed > 0
        self._obs_norm: ObsNorm | None = getattr(getattr(model, "encoder", None), "norm", None)
        self._new_moments: Tensor | None = None  # of observations that are not in the statistics yet

    def learning_rates(self, progress: float) -> dict[str, float]:
        rates = {name: group.learning_rate(progress) for name, group in self._groups.items()}
        return {f"learn/lr_{name}" if name else "learn/lr": rate for name, rate in rates.items()}

    def set_learning_rate(self, value: float | None, group: str | None = None) -> None:
        """Replace a group's schedule with a constant, also after a resume; None restores the schedule.

        `group` may be omitted if there is only one.
        """
        name = next(iter(self._groups)) if group is None and len(self._groups) == 1 else group
        found = self._group(name, "set_learning_rate")
        rate = None if value is None else float(value)
        if rate is not None and not 0 <= rate < math.inf:
            raise UserError(f"learning_rate must be at least 0 and finite, got {rate:g}.")
        found.fixed_lr = rate

    def _group(self, name: str | None, what: str) -> _Group:
        if name is None or name not in self._groups:
            names = ", ".join(map(repr, self._groups))
            raise UserError(f"{what} needs one of the algorithm's parameter groups ({names}), got {name!r}.")
        return self._groups[name]

    def agree(self, ready: bool) -> bool:
        """Whether an update can be made: learners that update together all need data."""
        return self._exchange.agree(ready)

    def step(self, sample: Sample, progress: float, reward_scale: float = 1.0) -> list[LossOutput]:
        ctx = UpdateContext(progress, self._generator, reward_scale)
        for group in self._groups.values():
            group.set_learning_rate(progress)
        if not self._counts_inserts and isinstance(sample.batch, Trajectory):
            self._new_moments = self._obs_moments(sample.batch)
        with np.errstate(all="ignore"):  # non-finite values are checked and reported once per update
            done = self._updates(sample, ctx)
        self._merge_new_moments()  # after learning, so that probability ratios start at exactly 1
        return done

    def observe(self, traj: Trajectory) -> None:
        """Add the observations of a trajectory that enters a replay store to the statistics, with the next update.

        Without replay nothing is added here: each batch is sampled once, and counted then.
        """
        moments = self._obs_moments(traj) if self._counts_inserts else None
        if moments is not None and self._new_moments is not None:
            moments = torch.from_numpy(merged(self._new_moments.numpy(), moments.numpy()))
        self._new_moments = moments

    def _updates(self, sample: Sample, ctx: UpdateContext) -> list[LossOutput]:
        done: list[LossOutput] = []
        batch = self.algo.prepare(self.model, sample.batch)
        minibatch = None
        for minibatch, is_last in _with_last(self.algo.minibatches(batch, ctx.generator)):
            applied, stopped = 0, False
            for output in self._losses(minibatch, ctx):
                group = self._group(output.group, "The group of a LossOutput")
                norm = self._read(group, output)
                action = self._exchange_gradient(group, output, norm, is_last)
                if action == "stop":
                    stopped = True
                    break
                if action == "skip":  # a server has applied it, and the weights are new
                    self._bad_in_a_row = 0
                elif self._clip_and_check(group, output, norm, sample):
                    group.optimizer.step()
                else:
                    continue
                applied += 1
                done.append(output)
            if applied:
                self._finish_update()
            if stopped or self._exchange.over:
                break
        if minibatch is None:  # otherwise others would wait for this learner's gradient
            first = next(iter(self._groups.values()))
            self._exchange.grads(first.grad.zero_(), 0, first.lr, group=0, stop=True)
        if done and isinstance(batch, Minibatch):
            done[0].metrics["loss/explained_variance"] = batch.explained_variance
        return done

    def _losses(self, minibatch: Any, ctx: UpdateContext) -> Iterator[LossOutput]:
        """Yield each loss with its gradient computed; the caller steps the group before asking for the next."""
        fast = self._fast_loss
        if fast is not None and fast.takes(minibatch):
            output = fast.compute(self.algo, self.model, self.target, minibatch, ctx)
            self._backward(output)
            yield output
            return
        losses: Any = self.algo.losses(self.model, self.target, minibatch, ctx)
        upcoming: Any = None
        for upcoming in losses if isinstance(losses, Iterable) else ():
            if not isinstance(upcoming, LossOutput):
                break
            self._backward(upcoming)
            yield upcoming
        if not isinstance(upcoming, LossOutput):
            raise UserError(f"{type(self.algo).__name__}.losses must yield a LossOutput (`yield`, not `return`).")

    def _backward(self, output: LossOutput) -> None:
        self.flat.grad.zero_()
        if self.device.type != "cpu" or not output.stop:  # reading it would wait for the device once more
            (output.backward or output.loss.backward)()

    def _read(self, group: _Group, output: LossOutput) -> float:
        """Replace the output's tensors by numbers, and return the gradient's norm: one read from the device for all."""
        norm = torch.linalg.vector_norm(group.grad)
        if output.backward is not None:  # it has numbers already
            return float(norm)
        values = [norm, output.loss, output.stop, output.rows, *output.metrics.values(), output.priorities]
        arrays = iter(read_tensors([value for value in values if isinstance(value, Tensor)]))
        numbers = (next(arrays) if isinstance(value, Tensor) else value for value in values)
        norm, loss, stop, rows, *metrics, output.priorities = numbers
        output.loss, output.stop, output.rows = float(loss), bool(stop), int(rows)
        output.metrics = dict(zip(output.metrics, map(float, metrics), strict=True))
        return float(norm)

    def _exchange_gradient(self, group: _Group, output: LossOutput, norm: float, is_last: bool) -> GradAction:
        if not math.isfinite(output.loss):
            group.grad.fill_(math.nan)  # even if finite: learners that share it must all skip the update
        if output.stop:
            group.grad.zero_()
        elif self._exchange.clips_first:
            group.clip(norm, output)
        return self._exchange.grads(
            group.grad, output.rows, group.lr, group=group.index, stop=output.stop, last=is_last
        )

    def _clip_and_check(self, group: _Group, output: LossOutput, norm: float, sample: Sample) -> bool:
        """Clip the gradient; if it is not finite, report it and return False."""
        if type(self._exchange) is not Exchange:  # it has other learners' gradients now
            norm = float(torch.linalg.vector_norm(group.grad))
        group.clip(norm, output)
        loss = output.loss
        if math.isfinite(norm) and math.isfinite(loss):
            self._bad_in_a_row = 0
            return True
        self.skipped += 1
        self._bad_in_a_row += 1
        source = _not_finite(sample.batch) or ("loss" if not math.isfinite(loss) else "gradient")
        self._report(f"update {self.version + 1} was skipped: its {source} is not finite; the weights are unchanged")
        if self._bad_in_a_row >= _MAX_BAD_IN_A_ROW:
            raise RunFailed(
                f"{self._bad_in_a_row} consecutive updates had a {source} that is not finite; lower "
                "learning_rate, or check the scale of the rewards."
            )
        return False

    def _finish_update(self) -> None:
        self._exchange.params(self.flat.weights.data)
        self.version += 1
        if self.target is not None:
            self.algo.update_target(self.model, self.target, self.version)

    def _obs_moments(self, batch: Trajectory) -> Tensor | None:
        """Moments of the observations that were acted on, for `ObsNorm.merge`; None if they are not normalised."""
        if self._obs_norm is None:
            return None
        valid = torch.from_numpy(batch.valid.reshape(-1))
        rows = tree_map(lambda leaf: torch.from_numpy(leaf[:-1].reshape(-1, *leaf.shape[2:]))[valid], batch.obs)
        moments: Tensor = self.model.encoder.moments(rows)  # type: ignore[operator, union-attr]
        return moments

    def _merge_new_moments(self) -> None:
        """Add the new observations of all learners that share them to the statistics."""
        norm = self._obs_norm
        if norm is None:
            return
        moments, self._new_moments = self._new_moments, None
        if moments is None:
            moments = norm.mean.new_zeros(2 * len(norm.mean) + 1)
        for moments_to_merge in self._exchange.share(moments):
            norm.merge(moments_to_merge)
        if self.target is not None:
            self.target.encoder.norm.load_state_dict(norm.state_dict())  # type: ignore[union-attr]

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": dict(self.model.state_dict()),
            "target": None if self.target is None else dict(self.target.state_dict()),
            "optimizer": self.join_optimizers([group.optimizer_state() for group in self._groups.values()]),
            "rng": self._generator.get_state(),
            "version": self.version,
            "skipped": self.skipped,
            "new_moments": self._new_moments,
            "learning_rates": {n: group.fixed_lr for n, group in self._groups.items() if group.fixed_lr is not None},
            "first_learning_rates": {n: group.first_lr for n, group in self._groups.items()},
        }

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """The weights of another network, statistics of observations included; the optimizer starts anew."""
        self.model.load_state_dict(weights)
        if self.target is not None:
            self.target.load_state_dict(weights)

    def join_optimizers(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Optimizer state for a checkpoint: that of a single group, or several by group name."""
        return states[0] if len(states) == 1 else dict(zip(self._groups, states, strict=True))

    def split_optimizer(self, state: dict[str, Any]) -> list[dict[str, Any]]:
        return [state] if len(self._groups) == 1 else [state[name] for name in self._groups]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        try:
            self.model.load_state_dict(state["model"])
        except RuntimeError as error:
            raise UserError(
                "The saved weights do not fit the network that the settings describe "
                f"({str(error).splitlines()[1].strip()}): restore the settings."
            ) from error
        if self.target is not None:
            self.target.load_state_dict(state["target"])
        for group, optimizer in zip(self._groups.values(), self.split_optimizer(state["optimizer"]), strict=True):
            group.load_optimizer_state(optimizer)
        self._generator.set_state(torch.as_tensor(state["rng"], dtype=torch.uint8))
        self.version, self.skipped = state["version"], state["skipped"]
        # Older checkpoints lack these keys.
        self._new_moments = None if state.get("new_moments") is None else torch.as_tensor(state["new_moments"]).clone()
        for name, group in self._groups.items():
            if state.get("first_learning_rates", {}).get(name, group.first_lr) == group.first_lr:
                group.fixed_lr = state.get("learning_rates", {}).get(name)
            else:  # the setting was changed since, which ends what a callback had set
                group.fixed_lr = None


class _Group:
    """A parameter group: its slice of the weights, its optimizer and its clip."""

    def __init__(self, index: int, group: ParamGroup, flat_slice: GroupSlice):
        self.index, self.grad, self._group = index, flat_slice.grad, group
        self.fixed_lr: float | None = None  # instead of the schedule
        self.optimizer = group.optimizer([flat_slice.weights])
        self.lr = 0.0

    @property
    def first_lr(self) -> float:
        """By the settings, at the run's start."""
        return self._group.learning_rate(0.0)

    def learning_rate(self, progress: float) -> float:
        return self._group.learning_rate(progress) if self.fixed_lr is None else self.fixed_lr

    def set_learning_rate(self, progress: float) -> None:
        self.lr = self.learning_rate(progress)
        for param_group in self.optimizer.param_groups:
            param_group["lr"] = self.lr

    def clip(self, norm: float, output: LossOutput) -> None:
        """Clip the gradient, given its norm."""
        limit = self._group.max_grad_norm
        output.metrics.setdefault(f"loss/{self._group.name}_grad_norm" if self._group.name else "loss/grad_norm", norm)
        if math.isfinite(norm) and norm > limit:
            self.grad.mul_(limit / (norm + 1e-6))

    def optimizer_state(self) -> dict[str, Any]:
        return dict(self.optimizer.state_dict()["state"].get(0, {}))

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        whole = self.optimizer.state_dict()
        whole["state"] = {0: state} if state else {}
        self.optimizer.load_state_dict(whole)


def _with_last(items: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
    """Every item, and whether it is the last."""
    items = iter(items)
    item = next(items, None)
    while item is not None:
        upcoming = next(items, None)
        yield item, upcoming is None
        item = upcoming


def _not_finite(batch: Trajectory | Transitions | Positions) -> str | None:
    """The field of a batch that is not finite, if any."""
    found: list[str] = []

    def look(name: str) -> Callable[[Any], None]:
        return lambda leaf: found.append(name) if leaf.dtype.kind == "f" and not np.isfinite(leaf).all() else None

    tree_map(look("observation"), batch.obs)
    tree_map(look("reward"), batch.outcome if isinstance(batch, Positions) else batch.reward)
    return found[0] if found else None
