"""The exchange that a `DataParallelConfig` describes."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from corral.algos.base import ParamGroup
from corral.learn.exchange.all_reduce import AllReduce
from corral.learn.exchange.base import Joint
from corral.learn.exchange.compress import Codec, Qsgd, Whole, find_compression
from corral.learn.exchange.config import DataParallelConfig
from corral.learn.exchange.gossip import Gossip
from corral.learn.exchange.param_server import ParamServer
from corral.learn.weights import group_slices, split_params


def make_exchange(
    config: DataParallelConfig, model: nn.Module, groups: Sequence[ParamGroup], host: str, secret: bytes, seed: int
) -> Joint:
    """One learner's side; `host` is this machine's address, `secret` authenticates the learners to each other."""
    compress, codec = find_compression(config.compress), gradient_codec(config)
    feedback = compress is not None and (compress.hook is not None or not codec.unbiased)
    if config.exchange == "gossip":
        return Gossip(config.gossip_graph, *config.rule, broadcast_codec(config), host, secret, seed=seed)
    if config.exchange == "param_server":
        return ParamServer(
            codec, broadcast_codec(config), group_slices(model, groups),
            feedback=feedback, momentum=config.compress_momentum, seed=seed,
        )  # fmt: skip
    params = split_params(model, groups)
    return AllReduce(compress, feedback=feedback, momentum=config.compress_momentum, seed=seed, params=params)


def gradient_codec(config: DataParallelConfig) -> Codec:
    """The codec of gradients."""
    compress = find_compression(config.compress)
    return Whole() if compress is None else compress.codec


def broadcast_codec(config: DataParallelConfig) -> Codec:
    """The codec of weights."""
    return Qsgd(8) if config.quantize_weights else Whole()
