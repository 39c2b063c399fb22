"""`DataParallelConfig`: how the workers of the topology `data_parallel` share gradients or weights."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from corral.core.errors import UserError

EXCHANGES = {
    "all_reduce": "corral.learn.exchange.all_reduce:AllReduce",
    "param_server": "corral.learn.exchange.param_server:ParamServer",
    "gossip": "corral.learn.exchange.gossip:Gossip",
}
"""The exchanges by name; each class makes one learner's side, and names how its workers meet."""
Mode = Literal["sync", "async", "ssp"]
_MODE = re.compile(r"sync|async|ssp:\d+")


@dataclass(frozen=True)
class DataParallelConfig:
    """Which exchange the workers use, which of them wait, and how much they send."""

    exchange: str = "all_reduce"
    """all_reduce: average every gradient, all workers have the same weights; param_server: send gradients to a server,
    which returns weights; gossip: every worker learns by itself and mixes its weights with those of a few others;
    module:Class: an exchange of your own."""
    mode: str = "sync"
    """sync: all workers wait for each other; async: none waits; ssp:K (stale synchronous parallel): a worker waits
    while it is more than K updates ahead of the slowest."""
    servers: int = 1
    """Server processes, each with a slice of the weights, with exchange=param_server."""
    backup_workers: int = 0
    """Slowest workers that an update does not wait for, with exchange=param_server and mode=sync."""
    gossip_graph: Literal["ring", "exponential", "complete"] = "exponential"
    """Which workers send to which, with exchange=gossip."""
    compress: str = "none"
    """Compression of gradients: fp16, bf16, powersgd:RANK, sign, qsgd:BITS, topk:SHARE, topk:SHARE+qsgd:BITS."""
    compress_momentum: float = 0.0
    """Momentum correction of gradients that wait to be sent, with compress=topk."""
    quantize_weights: bool = False
    """Send weights in 8 bits, by servers and in gossip."""

    def __post_init__(self) -> None:
        if self.exchange not in EXCHANGES and ":" not in self.exchange:
            raise UserError(
                f"data_parallel.exchange must be {', '.join(EXCHANGES)} or module:Class, got {self.exchange!r}."
            )
        if not _MODE.fullmatch(self.mode):
            raise UserError(
                f"data_parallel.mode must be sync, async or ssp:K, such as ssp:3, got {self.mode!r} (the mode of "
                "ppo-search is search_mode)."
            )
        for name, least in (("servers", 1), ("backup_workers", 0)):
            if getattr(self, name) < least:
                raise UserError(f"data_parallel.{name} must be at least {least}, got {getattr(self, name)}.")
        if not 0 <= self.compress_momentum < 1:
            raise UserError(
                f"data_parallel.compress_momentum must be at least 0 and below 1, got {self.compress_momentum}."
            )
        kind = self.exchange
        if kind == "all_reduce" and self.mode != "sync":
            raise UserError(f"all_reduce is synchronous: mode={self.mode} needs exchange=param_server or gossip.")
        if kind != "param_server" and (self.servers > 1 or self.backup_workers):
            raise UserError(f"{'servers' if self.servers > 1 else 'backup_workers'} needs exchange=param_server.")
        if self.backup_workers and (self.mode != "sync" or self.servers > 1):
            raise UserError(
                "backup_workers needs mode=sync and servers=1: more servers would drop different gradients."
            )
        if kind != "gossip" and self.gossip_graph != "exponential":
            raise UserError(f"gossip_graph={self.gossip_graph} needs exchange=gossip.")
        if kind == "all_reduce" and self.quantize_weights:
            raise UserError("all_reduce sends no weights: quantize_weights needs exchange=param_server or gossip.")
        self._check_compression()

    def _check_compression(self) -> None:
        kind = self.compress.partition(":")[0]
        if self.compress != "none":
            if self.exchange == "gossip":
                raise UserError(
                    f"gossip sends weights, not gradients: compress={self.compress} needs exchange=all_reduce or "
                    "param_server; to compress gossip's messages, set quantize_weights=true."
                )
            if kind == "powersgd" and self.exchange != "all_reduce":
                raise UserError("powersgd compresses all-reductions only: it needs exchange=all_reduce.")
            from corral.learn.exchange.compress import find_compression

            find_compression(self.compress)
        if self.compress_momentum and kind != "topk":
            raise UserError("compress_momentum corrects gradients that topk delays: it needs compress=topk:SHARE.")

    @property
    def num_servers(self) -> int:
        """Server processes of the exchange; only param_server has any."""
        return self.servers if self.exchange == "param_server" else 0

    @property
    def rule(self) -> tuple[Mode, int]:
        """The mode without its number, and the number of updates that a worker may be ahead of the slowest."""
        mode, _, ahead = self.mode.partition(":")
        return mode, int(ahead or 0)  # type: ignore[return-value]
