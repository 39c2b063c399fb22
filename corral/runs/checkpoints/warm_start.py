"""Start a new run from the weights of another one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from corral.config.experiment import Experiment
from corral.core.errors import UserError
from corral.core.portable import pointed_to
from corral.nets.config import NetConfig
from corral.runs.checkpoints import checkpoint
from corral.runs.folder import RunFolder
from corral.runs.load import find_checkpoint

if TYPE_CHECKING:
    from corral.topologies.base import Topology


def resolve_start(run: str | Path) -> str:
    """The full path of the checkpoint that `run`, a run directory or a checkpoint, stands for now."""
    folder, which = find_checkpoint(Path(run), "best")
    path = (folder.checkpoints / (pointed_to(folder.checkpoints / which) or which)).resolve()
    if not path.exists():
        raise UserError(f"{run} has no checkpoint to start from: let it train longer, or leave init out.")
    return str(path)


def load_start(topology: Topology, start: str) -> str:
    """Load the weights of that checkpoint, statistics of observations included; returns what was loaded."""
    folder, which = find_checkpoint(Path(start), "best")
    weights, meta = checkpoint.load(folder, which, only=checkpoint.POLICY)
    difference = _difference(weights, topology.model.state_dict()) or _other_function(folder, topology)
    if difference:
        raise UserError(
            f"The network of {folder.path} does not fit this run: {difference}. Use an environment with spaces of the "
            f"same shape, an algorithm with the same network, and the same net settings (--config "
            f"{folder.path / 'config.yaml'})."
        )
    topology.load_weights(weights)
    return f"weights of {start}: {folder.algo} on {folder.env} after {meta['step']:,} steps"


def _other_function(folder: RunFolder, topology: Topology) -> str:
    """The first setting by which the same weights would be another function; empty if there is none."""
    from corral.nets.leaf_encoding import choose_encoding
    from corral.nets.network import has_image_encoder

    try:
        experiment = Experiment.from_dict(folder.config)
    except UserError:  # only the script that trained it has its algorithm
        return ""
    theirs, ours = (getattr(each.algorithm, "net", None) for each in (experiment, topology.experiment))
    if not isinstance(theirs, NetConfig) or not isinstance(ours, NetConfig):
        return ""
    is_mlp = bool(ours.hidden_sizes) and not has_image_encoder(topology.model)
    if is_mlp and theirs.activation != ours.activation:
        return f"it has activation={theirs.activation} there and {ours.activation} here"
    for leaf in topology.spec.observation.leaves:
        one, other = (choose_encoding(leaf, net) for net in (theirs, ours))
        if one != other:
            return f"it has obs_encoding={theirs.obs_encoding} there and {ours.obs_encoding} here"
    return ""


def _difference(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """The first weight that differs in shape or is missing in one of them; empty if all fit."""
    for name in {**there, **here}:
        if name not in here or name not in there:
            return f"{name} exists only {'there' if name in there else 'here'}"
        theirs, ours = tuple(there[name].shape), tuple(here[name].shape)
        if theirs != ours:
            return f"{name} has shape {theirs} there and {ours} here"
    return ""
