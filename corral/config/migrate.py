"""Settings that earlier versions wrote, in today's names. The only place where old names live.

`config.yaml` says its format. Each format has one step that brings it to the next, so that a later change of a name
or of a default adds a step and leaves the others alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from corral.config.overrides import read_yaml
from corral.core.errors import UserError

_log = logging.getLogger("corral.runs")

FORMAT = 2
"""What this version writes."""

_GROUPS_1 = {"scale", "sharing", "evaluation", "checkpoints", "log"}
"""Format 1 had no number; its files hold every setting, and so all of these."""

_ENVS_2 = {
    "corral.testing.hybrid:MoveOrShoot": "corral.testing.tasks:MoveOrShoot",
    "corral.testing.hybrid_walk:HybridWalk": "corral.testing.tasks:HybridWalk",
    "corral.testing.stateless:StatelessCartPole": "corral.testing.tasks:StatelessCartPole",
}


def read_config(path: Path) -> dict[str, Any]:
    """The settings in a YAML file: a user's own, or the `config.yaml` of a run, whatever version wrote it."""
    return migrate(read_yaml(path), str(path))


def migrate(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The settings of a `config.yaml` as this version would have written them, without the number of its format."""
    found = dict(config)
    written = found.pop("format", 1 if found.keys() >= _GROUPS_1 else FORMAT)
    if not isinstance(written, int) or not 1 <= written <= FORMAT:
        raise UserError(
            f"{source} has format {written}, and this version of Corral reads 1 to {FORMAT}: use the version that "
            "wrote it."
        )
    for step in range(written, FORMAT):
        found = _STEPS[step](found)
    return found


def _to_2(config: dict[str, Any]) -> dict[str, Any]:
    listen = config.pop("listen", None)
    if config.get("backend") == "grpc":
        _log.warning(
            "This run had its environments on other machines (backend=grpc, which is gone): now they run here. "
            "To have them elsewhere, train with --env grpc://%s and start `corral serve %s --connect grpc://%s` there.",
            listen, config.get("env"), listen,
        )  # fmt: skip
        config["backend"] = "auto"
    return config | {name: _ENVS_2[config[name]] for name in ("env", "preset") if config.get(name) in _ENVS_2}


_STEPS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {1: _to_2}
