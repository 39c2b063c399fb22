"""Sends new weights to actors."""

from __future__ import annotations

from typing import Any

import numpy as np

from corral.config.experiment import Experiment
from corral.core.encoding import Value
from corral.core.errors import UserError
from corral.learn.learner import Learner
from corral.runtimes.base import Runtime
from corral.runtimes.supervised_role import SupervisedRole


class WeightChannel:
    """Sends the newest weights to the actors that need them.

    `sync`: actors get every version before they act. `async`: actors get the newest with each request. `lag`: only
    actors more than `lag` versions behind.
    """

    def __init__(self, learner: Learner, runtime: Runtime, lag: int):
        self._learner, self._runtime, self._lag = learner, runtime, lag
        self._sent: dict[SupervisedRole, int] = {}
        self._shared: tuple[int, Value] | None = None
        self.sends = 0

    def offer(self, member: SupervisedRole) -> None:
        """Send a member the newest weights if it needs them now."""
        newest = self._learner.version
        if member not in self._sent or newest - self._sent[member] > self._lag:
            member.send_mail("weights", self._newest())
            self._sent[member] = newest
            self.sends += 1

    def forget(self, member: SupervisedRole) -> None:
        """The member was restarted and has no weights."""
        self._sent.pop(member, None)

    def version(self, member: SupervisedRole) -> int:
        return self._sent.get(member, -1)

    def _newest(self) -> Value:
        learner = self._learner
        if self._shared is None or self._shared[0] != learner.version:
            buffers = {name: value.cpu().numpy().copy() for name, value in learner.model.named_buffers()}
            mail: dict[str, Any] = {
                "version": learner.version,
                "weights": np.array(learner.flat.weights.detach().cpu().numpy()),
                "buffers": buffers,
                "precision": learner.precision.name,
                "device": learner.device.type,
            }
            self._shared = learner.version, self._runtime.share(mail)
        return self._shared[1]


def weights_mode(experiment: Experiment, max_lag: int | None) -> str:
    """`sync`, `async` or `lag`; UserError if the algorithm does not support it."""
    wanted = experiment.actor_learner.weight_sync.partition(":")[0]
    if wanted == "auto":
        return "sync" if max_lag == 0 else "async"
    if wanted != "sync" and max_lag == 0:
        raise UserError(
            f"{experiment.algo} is on-policy, so weight_sync={wanted} would train it badly: set weight_sync=sync, or "
            "use appo or impala, which correct for the lag."
        )
    return wanted
