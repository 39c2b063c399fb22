"""Legal actions, where an environment says which are: `info["action_mask"]`, as Gymnasium has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from corral.core.types import Array


def legal(action: Any, info: Mapping[str, Any]) -> Any:
    """The action, or, where the environment says that it is not legal now, another one that is."""
    mask = info.get("action_mask") if isinstance(info, dict) else None
    if mask is None or mask[action]:
        return action
    there = np.flatnonzero(mask)
    return there[action % len(there)] if len(there) else action


def require_legal(name: str, move: int, mask: Array) -> None:
    """ValueError unless a game's move may be made."""
    if 0 <= move < len(mask) and mask[move]:
        return
    there = ", ".join(map(str, np.flatnonzero(mask))) or "none, the game is over: call reset()"
    raise ValueError(
        f"{name}: {move} is not a legal move here; legal: {there}. Train it with alphazero: other algorithms do not "
        "look at masks."
    )
