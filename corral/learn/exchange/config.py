"""`SharingConfig`: how learners of the topology `data_parallel` share what they learn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from corral.core.errors import UserError


@dataclass(frozen=True)
class SharingConfig:
    """Which exchange the workers have, who waits for whom, and how many bytes it takes."""

    exchange: Literal["all_reduce", "param_server", "gossip"] = "all_reduce"
    """all_reduce: everybody's mean gradient, the same weights everywhere; param_server: gradients to a server, weights
    back; gossip: everybody for itself, mixing weights with a few others."""
    mode: Literal["sync", "async", "lag"] = "sync"
    """Who waits for whom: sync (everyone for everyone), async (nobody), lag (who is more than `lag` updates ahead)."""
    lag: int = 0
    """Updates that a worker may be ahead of the slowest, with mode=lag."""
    servers: int = 1
    """Processes that keep the weights, a slice each, with exchange=param_server."""
    drop: int = 0
    """Workers that an update does not wait for, with exchange=param_server and mode=sync."""
    graph: Literal["ring", "exponential", "complete"] = "exponential"
    """Who sends to whom, with exchange=gossip."""
    compress: str = "none"
    """Gradients in fewer bytes: fp16, bf16, powersgd:RANK, sign, qsgd:BITS, topk:SHARE, topk:SHARE+qsgd:BITS."""
    error_feedback: bool | None = None
    """Whether what a compression leaves out is added to the next gradient; none: where it is biased, but for fp16 and
    bf16 in an all-reduction, which torch does without."""
    momentum: float = 0.0
    """Momentum of the gradients that wait to be sent, with compress=topk (momentum correction)."""
    quantize_weights: bool = False
    """Whether weights are sent in 8 bits, by servers and in gossip."""

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        for name, least in (("lag", 0), ("servers", 1), ("drop", 0)):
            if getattr(self, name) < least:
                raise UserError(f"sharing.{name} must be at least {least}, got {getattr(self, name)}.")
        if not 0 <= self.momentum < 1:
            raise UserError(f"sharing.momentum must be at least 0 and below 1, got {self.momentum}.")
        kind = self.exchange
        if kind == "all_reduce" and self.mode != "sync":
            raise UserError(f"An all-reduction is of everybody: mode={self.mode} needs another exchange.")
        if self.lag and self.mode != "lag":
            raise UserError(f"lag={self.lag} needs mode=lag.")
        if kind != "param_server" and (self.servers > 1 or self.drop):
            raise UserError(f"{'servers' if self.servers > 1 else 'drop'} needs exchange=param_server.")
        if self.drop and (self.mode != "sync" or self.servers > 1):
            raise UserError("drop needs mode=sync, and one server: others would drop other gradients.")
        if kind != "gossip" and self.graph != "exponential":
            raise UserError(f"graph={self.graph} needs exchange=gossip.")
        if kind == "all_reduce" and self.quantize_weights:
            raise UserError("An all-reduction sends no weights: quantize_weights needs another exchange.")
        self._check_compression()

    def _check_compression(self) -> None:
        kind = self.compress.partition(":")[0]
        if self.compress != "none":
            if self.exchange == "gossip":
                raise UserError(
                    f"gossip sends weights and no gradients: compress={self.compress} needs exchange=all_reduce or "
                    "param_server; quantize_weights=true makes gossip's messages smaller."
                )
            if kind == "powersgd" and self.exchange != "all_reduce":
                raise UserError("powersgd is a way to reduce gradients: it needs exchange=all_reduce.")
            from corral.learn.exchange.compress import find_compression

            find_compression(self.compress)
        if self.error_feedback is not None and self.compress == "none":
            raise UserError("error_feedback is about what a compression leaves out: it needs compress.")
        if self.error_feedback and self.exchange == "all_reduce" and self.compress in ("fp16", "bf16"):
            raise UserError(f"{self.compress} in an all-reduction is torch's own, which has no error_feedback.")
        if self.momentum and kind != "topk":
            raise UserError("momentum is for what waits to be sent: it needs compress=topk:SHARE.")
        if self.momentum and self.error_feedback is False:
            raise UserError("momentum needs error_feedback: without it nothing waits to be sent.")
