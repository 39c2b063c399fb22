"""Environments as text, so that another machine can build them without running code from the wire."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from corral.core.errors import UserError
from corral.envs.resolve import Resolved, resolve


@dataclass(frozen=True)
class EnvText:
    """An id or `module:Class`, and keyword arguments as JSON.

    With `fields`, the class is a dataclass that builds environments when called, such as Corral's suites.
    """

    name: str  # for messages
    env: str
    kwargs: str
    fields: str | None

    def resolve(self) -> Resolved:
        """What builds it on this machine."""
        kwargs = json.loads(self.kwargs)
        if self.fields is None:
            return resolve(self.env, kwargs)
        module, _, name = self.env.partition(":")
        return resolve(getattr(importlib.import_module(module), name)(**json.loads(self.fields)), kwargs)


def as_text(env: Any, kwargs: Mapping[str, Any] | None = None) -> EnvText:
    """The text of an id, a name, or what can be imported by name; UserError where there is none."""
    if not isinstance(env, str) and not callable(env):
        resolve(env)  # says what is wrong with it
    kwargs = dict(kwargs or {})
    fields: dict[str, Any] | None = None
    if isinstance(env, functools.partial) and not env.args:
        env, kwargs = env.func, {**env.keywords, **kwargs}
    if dataclasses.is_dataclass(env) and not isinstance(env, type):
        fields = {field.name: getattr(env, field.name) for field in dataclasses.fields(env)}
    name = env if isinstance(env, str) else _importable(env if fields is None else type(env))
    if name is None:
        raise UserError(
            f"{getattr(env, '__qualname__', env)} has no name that another machine could import it by; with "
            "backend='grpc' pass an id, or 'module:Class' and env_kwargs."
        )
    try:
        options = None if fields is None else json.dumps(fields)
        return EnvText(getattr(env, "name", name), name, json.dumps(kwargs), options)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"The arguments of {name} have no JSON form ({error}); with backend='grpc' use numbers, text, lists and "
            "dicts of them."
        ) from None


def _importable(named: Any) -> str | None:
    """`module:name` of what is found there; what only this program has, or hides in a function, is not."""
    module, name = getattr(named, "__module__", None), getattr(named, "__qualname__", "")
    if module in (None, "__main__") or getattr(sys.modules.get(module), name, None) is not named:
        return None
    return f"{module}:{name}"
