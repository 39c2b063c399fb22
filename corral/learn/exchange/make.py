"""The exchange that a sharing config asks for."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from corral.algos.base import ParamGroup
from corral.learn.exchange.all_reduce import AllReduce
from corral.learn.exchange.base import Joint
from corral.learn.exchange.compress import Codec, Qsgd, Whole, find_compression
from corral.learn.exchange.config import SharingConfig
from corral.learn.exchange.gossip import Gossip
from corral.learn.exchange.param_server import ParamServer
from corral.learn.weights import group_slices, split_params


def make_exchange(
    sharing: SharingConfig, model: nn.Module, groups: Sequence[ParamGroup], host: str, secret: bytes, seed: int
) -> Joint:
    """One learner's side of it; `host` is this machine's own address, `secret` what others are let in by."""
    compress, codec = find_compression(sharing.compress), gradient_codec(sharing)
    feedback = compress is not None and (
        sharing.error_feedback
        if sharing.error_feedback is not None
        else compress.hook is not None or not codec.unbiased
    )
    if sharing.exchange == "gossip":
        return Gossip(sharing.graph, sharing.mode, sharing.lag, broadcast_codec(sharing), host, secret, seed=seed)
    if sharing.exchange == "param_server":
        return ParamServer(
            codec, broadcast_codec(sharing), group_slices(model, groups),
            feedback=feedback, momentum=sharing.momentum, seed=seed,
        )  # fmt: skip
    params = split_params(model, groups)
    return AllReduce(compress, feedback=feedback, momentum=sharing.momentum, seed=seed, params=params)


def gradient_codec(sharing: SharingConfig) -> Codec:
    """How gradients are written."""
    compress = find_compression(sharing.compress)
    return Whole() if compress is None else compress.codec


def broadcast_codec(sharing: SharingConfig) -> Codec:
    """How weights are written."""
    return Qsgd(8) if sharing.quantize_weights else Whole()
