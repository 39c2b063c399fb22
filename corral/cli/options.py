"""Options of a command, from the dataclass that declares them; errors are one sentence."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import difflib
import io
import re
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro

from corral.config.migrate import explain_old_name
from corral.config.overrides import explain_option, leaves, split_items
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
        if not stop.code:
            raise  # --help has been printed
        raise UserError(f"{_sentence(complaint.getvalue())}; see `{prog} --help`.") from None
    if unknown:
        raise UserError(_unknown(parsed, unknown, prog))
    return parsed


def _sentence(box: str) -> str:
    """The first paragraph of tyro's framed message, without frame, colour and title."""
    lines: list[str] = []
    for line in re.sub(r"\x1b\[[0-9;]*m", "", box).splitlines():
        text = line.strip(_FRAME)
        if line.lstrip().startswith("╭"):
            continue
        if set(text) <= {"─"}:
            if lines:
                break
            continue
        lines.append(text)
    if lines and lines[0].startswith("Missing"):  # the names follow, each with its help text
        lines[2:] = [f"({' '.join(lines[2:]).removesuffix('(required)').strip().removesuffix('.')})"]
    return " ".join(lines).removesuffix(".")


def _unknown(parsed: Any, unknown: Sequence[str], prog: str) -> str:
    option = next((token for token in unknown if token.startswith("-")), None)
    if option is None:
        return f"`{prog}` got an unexpected argument {unknown[0]!r}; see `{prog} --help`."
    option = option.partition("=")[0]
    fields = dataclasses.fields(parsed)
    options = ["--" + field.name.replace("_", "-") for field in fields if "Positional" not in str(field.type)]
    close = difflib.get_close_matches(option, options, 1)
    hint = f"did you mean {close[0]}?" if close else f"see `{prog} --help`."
    name = option.lstrip("-").replace("-", "_")
    hint = explain_old_name(name, [field.name for field in fields]) or hint
    if hasattr(parsed, "set"):
        from corral.config.experiment import Experiment

        with contextlib.suppress(UserError):
            settings = leaves(Experiment.make(parsed.algo, "CartPole-v1", preset="none"))
            hint = explain_option(name, settings) or hint
    return f"`{prog}` has no option {option}; {hint}"


Count = Annotated[int, tyro.conf.arg(metavar="N")]
OptionalCount = Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")]
Number = Annotated[str | None, tyro.conf.arg(metavar="N", help_behavior_hint="")]
"""Type of an option that is an integer, which may be written 1e5 or 100_000."""
Seconds = Annotated[
    float, tyro.conf.arg(metavar="SECONDS", help_behavior_hint=lambda default: f"(default: {float(default):g})")
]
Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help_behavior_hint="")]  # option without a value

# Options of several commands, with their help.
Quiet = Annotated[Flag, tyro.conf.arg(help="Show no progress, only the result.", help_behavior_hint="")]
RunDir = Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DIR", help="The run.")]
Checkpoint = Annotated[str, tyro.conf.arg(metavar="NAME", help="Checkpoint: best, latest, or a name.")]
EnvOrUrl = Annotated[
    tyro.conf.Positional[str],
    tyro.conf.arg(metavar="ENV|URL", help="Gymnasium id, your own module:Class, or the URL of an external simulator."),
]
EnvKwargs = Annotated[
    tyro.conf.UseAppendAction[tuple[tuple[str, ...], ...]],
    tyro.conf.arg(metavar="KEY=VALUE ...", help="Keyword arguments for the environment."),
]
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
    """Parse `key=value` items; a value is a Python literal if it parses as one, otherwise text."""
    kwargs: dict[str, Any] = {}
    for key, text in split_items(chain.from_iterable(given), "--env-kwargs").items():
        if not key.isidentifier():
            raise UserError(f"--env-kwargs takes names of arguments, got {key!r}.")
        try:
            kwargs[key] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            kwargs[key] = _LITERALS.get(text.lower(), text)
    return kwargs
