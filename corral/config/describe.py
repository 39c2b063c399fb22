"""The settings of an algorithm as text, for `corral train ALGO --help`; their meaning is the string below a field."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from operator import attrgetter
from typing import Any

from corral.algos.registry import find_algorithm
from corral.config import overrides as settings
from corral.config import presets
from corral.config.experiment import Experiment
from corral.config.hints import one_of

_CLOCKS = ("eval_", "checkpoint_", "keep_", "save_", "log_")
_INDENT, _COLUMN = 2, 32  # of names, and of what they mean
_ORDER = ("algorithm", "", "supervision", "actor_learner", "data_parallel")


def describe_settings(algo: str, preset: str, width: int) -> str:
    """Every setting with its value, choices and meaning; values are those of the preset, or "none" for the defaults."""
    entry = find_algorithm(algo)
    base = Experiment(algo=algo, env="", algorithm=entry.config()())
    chosen = settings.read(base, entry.settings) | settings.read(base, presets.settings(algo, preset))
    made, kinds = settings.apply(base, chosen | {"preset": preset}), settings.leaves(base)
    by_presets = {name for each in presets.presets_of(algo).values() for name in settings.read(base, each.settings)}
    lines: list[str] = []
    for title, names in _sections(made, algo):
        lines += ["", f"{title}:"]
        for name in names:
            mark = "*" if name in by_presets else ""
            head = f"{settings.short_name(name, kinds)}={_as_text(attrgetter(name)(made))}{mark}"
            lines += _entry(head, _meaning(made, name, settings.choices(kinds[name])), width)
    source = "their defaults" if preset == "none" else f"the values of the preset {preset}"
    intro = f"Settings of {algo} with {source}; `--set KEY=VALUE ...` changes them:"
    more = f"* changed by presets: `corral list presets` lists them, `corral train {algo} --env ID --help` shows one."
    shown = [*textwrap.wrap(intro, width), *lines, *(["", *textwrap.wrap(more, width)] if by_presets else [])]
    return "\n".join(shown)


def _sections(made: Experiment, algo: str) -> Iterator[tuple[str, list[str]]]:
    """Title and full names of the settings of each group."""
    groups: dict[str, list[str]] = {}
    for name in settings.leaves(made):
        if name not in ("algo", "env"):  # arguments of their own
            groups.setdefault(name.rpartition(".")[0], []).append(name)
    for group in sorted(groups, key=lambda group: (_ORDER.index(group.partition(".")[0]), group)):
        if group:
            doc = inspect.getdoc(type(attrgetter(group)(made))) or algo
            yield doc.partition("\n")[0].partition(".")[0], groups[group]
        else:
            clocks = [name for name in groups[group] if name.startswith(_CLOCKS)]
            yield "Run", [name for name in groups[group] if name not in clocks]
            yield "Evaluation, checkpoints and log", clocks


def _entry(head: str, meaning: str, width: int) -> list[str]:
    """A setting, and what it means beside it."""
    text = textwrap.wrap(meaning, width - _COLUMN) or [""]
    head = " " * _INDENT + head
    if len(head) >= _COLUMN:
        return [head, *(" " * _COLUMN + line for line in text)]
    return [f"{head:<{_COLUMN}}{text[0]}".rstrip(), *(" " * _COLUMN + line for line in text[1:])]


def _meaning(made: Any, name: str, choices: list[str]) -> str:
    group, _, last = name.rpartition(".")
    text = _texts(type(attrgetter(group)(made) if group else made)).get(last, "")
    return f"{text} One of {one_of(choices)}.".strip() if choices else text


def _texts(config: type[Any]) -> dict[str, str]:
    """The string below each field of a dataclass; none without its source."""
    try:
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(config))).body
    except (OSError, TypeError, SyntaxError):
        return {}
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in pairwise(getattr(definition, "body", []))
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


def _as_text(value: Any) -> str:
    """A value as `--set` takes it."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
