"""Options of a command, from the dataclass that declares them; errors are one sentence."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import difflib
import io
import json
import re
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from corral.config.hints import explain_option
from corral.config.migrate import explain_old_name
from corral.config.overrides import leaves, read_value, split_items
from corral.core.errors import UserError

T = TypeVar("T")

_FRAME = "│╭╮╰╯┃╷╵ "


def parse(command: type[T], args: Sequence[str], prog: str) -> T:
    """An instance of `command` with these options; UserError if they are wrong."""
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            parsed, unknown = tyro.cli(command, args=list(args), prog=prog, return_unknown_args=True)
    except SystemExit as stop:
        if not stop.code:  # --help has been printed
            more_help = getattr(command, "more_help", None)
            if more_help is not None:
                print(more_help(args))
            raise
        raise UserError(f"{_sentence(complaint.getvalue())}; see `{prog} --help`.") from None
    if unknown:
        raise UserError(_unknown(parsed, unknown, prog))
    return parsed


def _sentence(box: str) -> str:
    """The first paragraph of tyro's framed message, without frame, colour and title."""
    plain = "╭" not in box  # as on a terminal without such characters: the title is a paragraph of its own
    paragraphs: list[list[str]] = [[]]
    for line in re.sub(r"\x1b\[[0-9;]*m", "", box).splitlines():
        text = line.strip(_FRAME)
        if line.lstrip().startswith("╭"):
            continue
        if set(text) <= set("─-"):
            paragraphs.append([])
            continue
        paragraphs[-1].append(text)
    lines = [*filter(None, paragraphs)][plain]
    if lines[0].startswith("Missing") and lines[2:]:  # the names follow, each with its help text
        lines[2:] = [f"({' '.join(lines[2:]).removesuffix('(required)').strip().removesuffix('.')})"]
    return " ".join(lines).removesuffix(".")


def _unknown(parsed: Any, unknown: Sequence[str], prog: str) -> str:
    option = next((token for token in unknown if token.startswith("-")), None)
    if option is None:
        hint = f"write --env {unknown[0]}." if hasattr(parsed, "algo") else f"see `{prog} --help`."
        return f"`{prog}` got an unexpected argument {unknown[0]!r}; {hint}"
    option = option.partition("=")[0]
    fields = dataclasses.fields(parsed)
    options = ["--" + field.name.replace("_", "-") for field in fields if "Positional" not in str(field.type)]
    close = difflib.get_close_matches(option, options, 1)
    hint = f"did you mean {close[0]}?" if close else f"see `{prog} --help`."
    name = option.lstrip("-").replace("-", "_")
    known = [field.name for field in fields]
    hint = explain_old_name(name, known) or hint
    if hasattr(parsed, "set"):
        from corral.algos.registry import find_algorithm
        from corral.config.experiment import Experiment

        # `corral resume` has no algorithm: its run has.
        algo = getattr(parsed, "algo", "ppo")
        with contextlib.suppress(UserError):
            settings = leaves(Experiment(algo, env="", algorithm=find_algorithm(algo).config()()))
            hint = explain_option(name, settings, known) or hint
    return f"`{prog}` has no option {option}; {hint}"


_INTEGER: PrimitiveConstructorSpec[Any] = PrimitiveConstructorSpec(
    nargs=1,
    metavar="N",
    instance_from_str=lambda text: _integer(text[0]),
    is_instance=lambda value: value is None or isinstance(value, int),
    str_from_instance=lambda value: [str(value)],
)
Count = Annotated[int, _INTEGER]
"""Type of an option that is an integer, which may be written 1e5, 100k or 100_000, as every integer setting."""
OptionalCount = Annotated[int | None, _INTEGER, tyro.conf.arg(help_behavior_hint="")]
Number = Annotated[str | None, tyro.conf.arg(metavar="N", help_behavior_hint="")]
"""The same for an option that is a setting, which is read with the others."""
_REAL: PrimitiveConstructorSpec[Any] = PrimitiveConstructorSpec(
    nargs=1,
    metavar="X",
    instance_from_str=lambda text: _real(text[0]),
    is_instance=lambda value: value is None or isinstance(value, int | float),
    str_from_instance=lambda value: [str(value)],
)
OptionalReal = Annotated[float | None, _REAL, tyro.conf.arg(help_behavior_hint="")]
Seconds = Annotated[
    float,
    dataclasses.replace(_REAL, metavar="SECONDS"),
    tyro.conf.arg(help_behavior_hint=lambda default: f"(default: {float(default):g})"),
]
Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help_behavior_hint="")]  # option without a value

# Options of several commands, with their help.
Quiet = Annotated[Flag, tyro.conf.arg(help="Show no progress, only the result.", help_behavior_hint="")]
RunDir = Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DIR", help="The run.")]
Trust = Annotated[
    Flag,
    tyro.conf.arg(
        help="Trust the code and commands that this run names, now and later, on this machine.", help_behavior_hint=""
    ),
]
Checkpoint = Annotated[str, tyro.conf.arg(metavar="NAME", help="Checkpoint: best, latest, or a name.")]
EnvOrUrl = Annotated[
    tyro.conf.Positional[str],
    tyro.conf.arg(metavar="ENV|URL", help="Gymnasium id, your own module:Class, or the URL of an external simulator."),
]
EnvKwargs = Annotated[
    tyro.conf.UseAppendAction[tuple[tuple[str, ...], ...]],
    tyro.conf.arg(metavar="KEY=VALUE ...", help="Keyword arguments for the environment."),
]
Settings = Annotated[tyro.conf.UseAppendAction[tuple[tuple[str, ...], ...]], tyro.conf.arg(metavar="KEY=VALUE ...")]
Sinks = Annotated[
    tyro.conf.UseAppendAction[tuple[str, ...]],
    tyro.conf.arg(
        metavar="NAME|MODULE:CLASS",
        help="Your own corral.MetricSink, or csv or tensorboard to choose among the built-in ones.",
    ),
]
Callbacks = Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="MODULE:CLASS")]
JsonFile = Annotated[
    Path | None,
    tyro.conf.arg(metavar="FILE", help="Also write the results to this file, as JSON.", help_behavior_hint=""),
]

_LITERALS = {"true": True, "false": False, "none": None, "null": None}


def parse_env_kwargs(given: Iterable[Iterable[str]]) -> dict[str, Any]:
    """Parse `key=value` items; a value is a Python literal or JSON, otherwise text; `a.b=1` is an item of a mapping."""
    kwargs: dict[str, Any] = {}
    for key, text in split_items(chain.from_iterable(given), "--env-kwargs").items():
        *groups, last = key.split(".")
        if not all(part.isidentifier() for part in (*groups, last)):
            raise UserError(f"--env-kwargs takes names of arguments, got {key!r}.")
        inner = kwargs
        for part in groups:
            inner = inner.setdefault(part, {})
            if not isinstance(inner, dict):
                raise UserError(f"--env-kwargs sets {part!r} to a value and to a mapping: use one of both.")
        if last in inner:
            raise UserError(f"--env-kwargs names {key!r} twice.")
        inner[last] = _literal(key, text)
    return kwargs


def _literal(key: str, text: str) -> Any:
    nested = text.startswith(("{", "["))
    for read in (ast.literal_eval, json.loads) if nested else (ast.literal_eval,):
        with contextlib.suppress(ValueError, SyntaxError):
            return read(text)
    if nested:
        raise UserError(f"--env-kwargs {key}={text} is neither JSON nor a Python literal: write '{{\"a\": [1, 2]}}'.")
    return _LITERALS.get(text.lower(), text)


def _real(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"a number is needed, got {text!r}") from None


def _integer(text: str) -> int:
    try:
        value: int = read_value("", text, int)
    except UserError:
        raise ValueError(f"an integer is needed, got {text!r}") from None
    return value
