"""Priors of edges from a policy's logits."""

from __future__ import annotations

import math
from typing import Any

from corral.core.jit import compiled
from corral.core.types import Array
from corral.planning.mcts.forest import NOT_THERE


def _legal_softmax(logits: Array, legal: Array, out: Array) -> None:
    """Softmax of rows over what is legal; the rest is not there. Where no legal logit is above -inf all are 0."""
    for i in range(legal.shape[0]):
        top = -math.inf
        for a in range(legal.shape[1]):
            if legal[i, a]:
                top = max(top, float(logits[i, a]))
        whole = 0.0
        for a in range(legal.shape[1]):
            weight = math.exp(float(logits[i, a]) - top) if legal[i, a] and top > -math.inf else 0.0
            out[i, a] = weight
            whole += weight
        for a in range(legal.shape[1]):
            if not legal[i, a]:
                out[i, a] = NOT_THERE
            elif whole > 0:
                out[i, a] /= whole


legal_softmax: Any = compiled(_legal_softmax, nogil=True)
