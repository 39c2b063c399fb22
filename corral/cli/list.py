"""`corral list algos|envs|presets`."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

import tyro

from corral.core.errors import UserError


@dataclass(frozen=True)
class ListAlgos:
    """List the algorithms with their action spaces and the environments they are verified on."""

    def run(self) -> int:
        from corral.algos.registry import ALGORITHMS
        from corral.cli.console import print_table
        from corral.config import presets

        print_table(
            ("algorithm", "what it does", "action spaces", "verified on"),
            (
                (name, entry.summary, entry.actions, ", ".join(presets.verified(name)) or "-")
                for name, entry in ALGORITHMS.items()
            ),
        )
        return 0


@dataclass(frozen=True)
class EnvFamily:
    """A source of environments, and the package that it needs."""

    title: str
    module: str = ""  # the package that must be installed

    @property
    def ready(self) -> bool:
        return not self.module or importlib.util.find_spec(self.module) is not None

    @property
    def install(self) -> str:
        from corral.core.gym_env import INSTALL

        return INSTALL.get(self.module, f"install {self.module}")


_ATARI = EnvFamily("Atari", "ale_py")
_OLD_ATARI = EnvFamily("Atari, older names", "ale_py")
_GROUPS = {
    "gymnasium.envs.classic_control": EnvFamily("Classic control"),
    "gymnasium.envs.toy_text": EnvFamily("Toy text"),
    "gymnasium.envs.box2d": EnvFamily("Box2D", "Box2D"),
    "gymnasium.envs.mujoco": EnvFamily("MuJoCo", "mujoco"),
    "gymnasium.envs.phys2d": EnvFamily("Classic control in JAX", "jax"),
    "gymnasium.envs.tabular": EnvFamily("Toy text in JAX", "jax"),
    "corral.envs.suites.games": EnvFamily("Board games"),
    "ale_py": _ATARI,
}


_SUITES = {
    "corral.envs.suites:atari": _ATARI,
    "corral.envs.suites:pixels": EnvFamily("Pixels", "cv2"),
}
"""Environments that others are made from, with `--env-kwargs game=Pong` and `--env-kwargs env=CartPole-v1`."""


@dataclass(frozen=True)
class ListEnvs:
    """List the environments that can be used by name; one per line if the output is not a terminal."""

    filter: Annotated[str, tyro.conf.arg(metavar="TEXT", help_behavior_hint="")] = ""
    """Only ids that contain this text."""

    def run(self) -> int:
        groups = registered(self.filter)
        if sys.stdout.isatty():
            _print_groups(groups, self.filter)
        else:
            for group, ids in groups.items():
                if group.ready:
                    print(*ids, sep="\n")
        return 0


def registered(text: str = "") -> dict[EnvFamily, list[str]]:
    """Registered ids that contain `text`, by family; UserError if none of them can be used."""
    import gymnasium

    if _ATARI.ready:
        importlib.import_module("ale_py")  # registers its ids
    importlib.import_module("corral.envs.suites.games")  # so does this
    groups: dict[EnvFamily, list[str]] = {}
    if suites := [name for name in _SUITES if text.lower() in name.lower() and _SUITES[name].ready]:
        groups[EnvFamily("Suites")] = suites
    for env_id, spec in gymnasium.registry.items():
        # A callable entry point in Gymnasium only reports that the environment has moved.
        if isinstance(spec.entry_point, str) and text.lower() in env_id.lower():
            groups.setdefault(_group(env_id, spec.entry_point), []).append(env_id)
    if not groups:
        close = difflib.get_close_matches(text, gymnasium.registry, 3, 0.5)
        hint = f" Close: {', '.join(close)}." if close else " `corral list envs` shows all."
        raise UserError(f"No environment id contains {text!r}.{hint}")
    if not any(group.ready for group in groups):
        group, ids = next(iter(groups.items()))
        raise UserError(f"{ids[0]} needs the package {group.module}, which is missing; {group.install}.")
    in_order = sorted(groups, key=lambda group: group is _OLD_ATARI)
    return {group: sorted(groups[group]) for group in in_order}


def _group(env_id: str, entry_point: str) -> EnvFamily:
    module = entry_point.partition(":")[0]
    for prefix, group in _GROUPS.items():
        if module == prefix or module.startswith(f"{prefix}."):
            return _OLD_ATARI if group is _ATARI and not env_id.startswith("ALE/") else group
    return EnvFamily(module.partition(".")[0])


def _print_groups(groups: dict[EnvFamily, list[str]], text: str) -> None:
    from rich.columns import Columns

    from corral.cli.console import make_console

    console = make_console()
    pooled = _envpool_ids()
    starred = False
    for group, ids in groups.items():
        note = "  native backend: ALE" if group in (_ATARI, _OLD_ATARI) else ""
        if not group.ready:
            console.print(f"{group.title}: {len(ids)} more, not installed: {group.install}\n", style="yellow")
            continue
        if group.title == "Suites":
            note = "  with --env-kwargs game=Pong, --env-kwargs env=CartPole-v1"
        console.print(f"{group.title} ({len(ids)})", style="bold", end="")
        console.print(note, style="green")
        if group is _OLD_ATARI and not text:
            console.print("  e.g. PongNoFrameskip-v4; `corral list envs --filter pong` shows those of a game\n")
            continue
        marked = [f"{i}*" if i in pooled and not i.startswith("ALE/") else i for i in ids]
        starred = starred or marked != ids
        console.print(Columns(marked, padding=(0, 2), column_first=True))
        console.print()
    if starred:
        console.print("* also with backend='native' (EnvPool)")
    if not _ATARI.ready:
        console.print(f"Atari games: {_ATARI.install}")
    console.print("Your own: module:Class, e.g. `corral check-env my_package.my_env:MyEnv`.")


def _envpool_ids() -> Iterable[str]:
    if importlib.util.find_spec("envpool") is None:
        return ()
    import envpool

    return frozenset(envpool.list_all_envs())


@dataclass(frozen=True)
class ListPresets:
    """List the presets: the settings that `corral train` uses by default for an algorithm on an environment.

    On a terminal each has a line with algorithm, environment and status, and its note below; elsewhere one line.

    A verified preset was trained with several seeds; its note has the score, the steps and the time.
    """

    def run(self) -> int:
        from corral.cli.console import make_console
        from corral.config.presets import all_presets

        if not sys.stdout.isatty():
            for (algo, env), preset in all_presets().items():
                print(algo, env, preset.status, preset.note, sep="\t")
            return 0
        from rich.padding import Padding

        console = make_console()
        for (algo, env), preset in all_presets().items():
            console.print(f"{algo}  {env}  {preset.status}", style="bold" if preset.status == "verified" else "")
            console.print(Padding(preset.note, (0, 0, 0, 4)))
        return 0
