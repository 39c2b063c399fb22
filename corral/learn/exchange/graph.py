"""Who sends to whom in gossip, round by round."""

from __future__ import annotations

from typing import Literal

Graph = Literal["ring", "exponential", "complete"]


def receivers(graph: Graph, rank: int, size: int, number: int) -> list[int]:
    """Whom a learner sends to in this round.

    ring: the next one. exponential: who is 1, 2, 4, ... places on, in turn, so that after log2(size) rounds all are
    mixed, exactly so where `size` is a power of two. complete: all others.
    """
    if size == 1:
        return []
    if graph == "complete":
        return [other for other in range(size) if other != rank]
    hop = 1 << number % (size - 1).bit_length() if graph == "exponential" else 1
    return [(rank + hop) % size]


def senders(graph: Graph, rank: int, size: int, number: int) -> list[int]:
    """Who sends to a learner in this round."""
    return [other for other in range(size) if other != rank and rank in receivers(graph, other, size, number)]
