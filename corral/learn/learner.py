"""The learner: batches in, weights out. One class for every algorithm and topology."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from corral.algos.base import Algorithm
from corral.core.errors import RunFailed, UserError
from corral.core.types import LossOutput, Positions, Sample, Trajectory, Transitions, tree_map
from corral.learn.device import Precision
from corral.learn.exchange.base import Exchange, GradAction, Local
from corral.learn.weights import FlatParams

_MAX_BAD_IN_A_ROW = 10


class Learner:
    """Owns a network's weights, their optimizer, and the target network.

    An update whose loss or gradient is not finite is left out: the weights stay as they were, `report` is
    told where the fault lies, and too many in a row end the run.
    """

    def __init__(
        self,
        algo: Algorithm,
        model: nn.Module,
        rng: torch.Generator,
        precision: Precision,
        exchange: Exchange | None = None,
        report: Callable[[str], None] = lambda text: None,
    ):
        self.algo, self.model, self._rng, self._precision = algo, model, rng, precision
        self._exchange = exchange if exchange is not None else Local()
        self._report = report
        self.device = next(model.parameters()).device
        self.flat = FlatParams(model)
        self.target = copy.deepcopy(model).requires_grad_(False) if algo.uses_target else None
        model.autocast = precision.name == "bf16"  # type: ignore[assignment]
        if precision.name == "fp32":  # weights and gradients have their place in memory now
            for network in (model, self.target):
                getattr(network, "use_numpy", bool)()
        self.optimizer = algo.optimizer([self.flat.weights])
        self.version = 0
        """Updates so far."""
        self.skipped = 0
        """Updates left out because they were not finite."""
        self._bad_in_a_row = 0
        self._lr = 0.0

    def agree(self, ready: bool) -> bool:
        """Whether an update can be made: those who make every update together all need data for it."""
        return self._exchange.agree(ready)

    def step(self, sample: Sample, progress: float) -> list[LossOutput]:
        """Learn from one batch: prepare it, and update once per minibatch."""
        self._lr = self.algo.learning_rate(progress)
        for group in self.optimizer.param_groups:
            group["lr"] = self._lr
        with np.errstate(all="ignore"):  # what is not finite is looked for, and reported, once per update
            return self._updates(sample, progress)

    def _updates(self, sample: Sample, progress: float) -> list[LossOutput]:
        outputs, empty = [], True
        with self._precision.context(self.device):
            batch = self.algo.prepare(self.model, sample.batch)
        for minibatch, last in _with_last(self.algo.minibatches(batch, self._rng)):
            empty = False
            output = self.compute(minibatch, progress)
            if not math.isfinite(output.loss):
                self.flat.grad.fill_(math.nan)  # though it may be finite: learners that share it must all leave it out
            if self._exchange.clips_first and not output.stop:
                self._clip(output)
            verdict = self._exchange.grads(self.flat.grad, output.rows, self._lr, stop=output.stop, last=last)
            if verdict == "stop":
                break
            if verdict == "skip":
                self._bad_in_a_row = 0
            if verdict == "skip" or self._usable(output, sample):
                outputs.append(output)
                self.apply(verdict)
            if self._exchange.over:
                break
        if empty:  # others would wait for this learner's part
            self._exchange.grads(self.flat.grad.zero_(), 0, self._lr, stop=True)
        self._observe(sample.batch)
        return outputs

    def compute(self, minibatch: Any, progress: float) -> LossOutput:
        """Loss and gradient of a minibatch; the weights stay as they are."""
        self.flat.grad.zero_()
        with self._precision.context(self.device):
            output = self.algo.loss(self.model, self.target, minibatch, progress)
        if not output.stop:
            (output.backward or output.loss.backward)()
        output.loss = output.loss.item() if isinstance(output.loss, torch.Tensor) else float(output.loss)
        output.metrics = {k: v.detach() if isinstance(v, torch.Tensor) else v for k, v in output.metrics.items()}
        return output

    def apply(self, verdict: GradAction = "apply") -> None:
        """One optimizer step with the gradient at hand, unless somebody else has made it."""
        if verdict == "apply":
            self.optimizer.step()
        self._exchange.params(self.flat.weights.data)
        self.version += 1
        if self.target is not None:
            self.algo.update_target(self.model, self.target, self.version)

    def _usable(self, output: LossOutput, sample: Sample) -> bool:
        """Clip the gradient; False, with a report, where it is not finite."""
        norm, loss = self._clip(output), output.loss
        if math.isfinite(norm) and math.isfinite(loss):
            self._bad_in_a_row = 0
            return True
        self.skipped += 1
        self._bad_in_a_row += 1
        source = _not_finite(sample.batch) or ("loss" if not math.isfinite(loss) else "gradient")
        self._report(f"update {self.version + 1} was left out: its {source} is not finite; the weights stay")
        if self._bad_in_a_row >= _MAX_BAD_IN_A_ROW:
            raise RunFailed(
                f"{self._bad_in_a_row} updates in a row had a {source} that is not finite; try a lower "
                "learning_rate, or check the rewards' scale."
            )
        return False

    def _clip(self, output: LossOutput) -> float:
        """Scale the gradient down to the largest norm that it may have; returns what it was."""
        norm = float(self.flat.grad.norm())
        output.metrics.setdefault("loss/grad_norm", norm)
        if math.isfinite(norm) and norm > self.algo.max_grad_norm:
            self.flat.grad.mul_(self.algo.max_grad_norm / (norm + 1e-6))
        return norm

    def _observe(self, batch: Trajectory | Transitions | Positions) -> None:
        """Let the network's normalisation see what it has learned from, after the fact: ratios stay exact."""
        encoder = getattr(self.model, "encoder", None)
        if encoder is None or encoder.norm is None:
            return
        obs = batch.obs
        if isinstance(batch, Trajectory):
            valid = torch.from_numpy(batch.valid.reshape(-1))
            obs = tree_map(lambda leaf: torch.from_numpy(leaf[:-1].reshape(-1, *leaf.shape[2:]))[valid], obs)
        else:
            obs = tree_map(torch.from_numpy, obs)
        moments = encoder.moments(tree_map(lambda leaf: leaf.to(self.device), obs))
        for everybodys in self._exchange.share(moments):
            encoder.norm.merge(everybodys)
        if self.target is not None:
            self.target.encoder.norm.load_state_dict(encoder.norm.state_dict())  # type: ignore[union-attr]

    def state_dict(self) -> dict[str, Any]:
        """Everything that learning goes on from."""
        optimizer = self.optimizer.state_dict()["state"].get(0, {})
        return {
            "model": dict(self.model.state_dict()),
            "target": None if self.target is None else dict(self.target.state_dict()),
            "optimizer": dict(optimizer),
            "rng": self._rng.get_state(),
            "version": self.version,
            "skipped": self.skipped,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave; weights stay views of the flat tensor."""
        try:
            self.model.load_state_dict(state["model"])
        except RuntimeError as error:
            raise UserError(
                "The saved weights do not fit the network that the settings describe "
                f"({str(error).splitlines()[1].strip()}): restore the settings."
            ) from error
        if self.target is not None:
            self.target.load_state_dict(state["target"])
        whole = self.optimizer.state_dict()
        whole["state"] = {0: state["optimizer"]} if state["optimizer"] else {}
        self.optimizer.load_state_dict(whole)
        self._rng.set_state(torch.as_tensor(state["rng"], dtype=torch.uint8))
        self.version, self.skipped = state["version"], state["skipped"]


def _with_last(items: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
    """Every item, and whether it is the last one."""
    items = iter(items)
    item = next(items, None)
    while item is not None:
        upcoming = next(items, None)
        yield item, upcoming is None
        item = upcoming


def _not_finite(batch: Trajectory | Transitions | Positions) -> str | None:
    """What of a batch is not finite."""
    found: list[str] = []

    def look(name: str) -> Callable[[Any], None]:
        return lambda leaf: found.append(name) if leaf.dtype.kind == "f" and not np.isfinite(leaf).all() else None

    tree_map(look("observation"), batch.obs)
    tree_map(look("reward"), batch.outcome if isinstance(batch, Positions) else batch.reward)
    return found[0] if found else None
