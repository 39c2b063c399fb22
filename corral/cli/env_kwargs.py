"""Keyword arguments of an environment, written on the command line as key=value."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from typing import Annotated, Any

import tyro

from corral.core.errors import UserError

EnvKwargs = Annotated[tyro.conf.UseAppendAction[tuple[tuple[str, ...], ...]], tyro.conf.arg(metavar="KEY=VALUE ...")]
"""Type of an `--env-kwargs` option, which takes several items and may be repeated."""

_WORDS = {"true": True, "false": False, "none": None, "null": None}


def parse_env_kwargs(given: Iterable[Iterable[str]]) -> dict[str, Any]:
    """Parse `key=value` items; a value is a Python literal where it reads as one, and text otherwise."""
    kwargs: dict[str, Any] = {}
    for item in (item for items in given for item in items):
        key, equals, text = item.partition("=")
        if not equals or not key.isidentifier():
            raise UserError(f"--env-kwargs takes key=value, got {item!r}.")
        if key in kwargs:
            raise UserError(f"--env-kwargs names {key!r} twice.")
        try:
            kwargs[key] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            kwargs[key] = _WORDS.get(text.lower(), text)
    return kwargs
