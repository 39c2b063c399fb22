"""Start a new run from the weights of another one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from corral.core.errors import UserError
from corral.runs.checkpoints import checkpoint
from corral.runs.load import find_checkpoint

if TYPE_CHECKING:
    from corral.topologies.base import Topology


def resolve_start(run: str | Path) -> str:
    """The full path of the checkpoint that `run`, a run directory or a checkpoint, stands for now."""
    folder, which = find_checkpoint(Path(run), "best")
    path = (folder.checkpoints / which).resolve()
    if not path.exists():
        raise UserError(f"{run} has no checkpoint to start from: let it train longer, or leave init out.")
    return str(path)


def load_start(topology: Topology, start: str) -> str:
    """Load the weights of that checkpoint, statistics of observations included; returns what was loaded."""
    folder, which = find_checkpoint(Path(start), "best")
    weights, meta = checkpoint.load(folder, which, only=checkpoint.POLICY)
    difference = _difference(weights, topology.model.state_dict())
    if difference:
        raise UserError(
            f"The network of {folder.path} does not fit this run: {difference}. Use an environment with spaces of the "
            f"same shape, an algorithm with the same network, and the same net settings (--config "
            f"{folder.path / 'config.yaml'})."
        )
    topology.load_weights(weights)
    return f"weights of {start}: {folder.algo} on {folder.env} after {meta['step']:,} steps"


def _difference(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """The first weight that differs in shape or is missing in one of them; empty if all fit."""
    for name in {**there, **here}:
        if name not in here or name not in there:
            return f"{name} exists only {'there' if name in there else 'here'}"
        theirs, ours = tuple(there[name].shape), tuple(here[name].shape)
        if theirs != ours:
            return f"{name} has shape {theirs} there and {ours} here"
    return ""
