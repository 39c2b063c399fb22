"""Settings by name: full dotted names and short ones, values parsed by the field's type.

A config is a frozen dataclass whose fields are plain values or further configs. Its settings are named by dotted paths,
such as `algorithm.net.hidden_sizes`; any component but the last may be omitted while the name is unique. A name that
both the algorithm and something else have is the algorithm's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import numbers
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from corral.config.hints import explain_setting, one_of
from corral.config.migrate import explain_old_value
from corral.core.errors import UserError

T = TypeVar("T")

_BOOLEANS = {"true": True, "on": True, "yes": True, "false": False, "off": False, "no": False}
_NOTHING = ("none", "null")
_EXPONENTS = {"k": "e3", "m": "e6", "g": "e9"}  # 100k, 2.5M
_UNIT = re.compile(r"(?<=[\d.])[kmg]$", re.IGNORECASE)
_ALGORITHM = "algorithm"


class _Mismatch(Exception):
    """A value does not match its type; the caller adds the setting's name."""


def leaves(config: Any) -> dict[str, Any]:
    """Full name -> type of every setting, in field order, without objects of this process (metadata `live`)."""
    found: dict[str, Any] = {}
    kinds = get_type_hints(type(config))
    for field in dataclasses.fields(config):
        if "live" in field.metadata:
            continue
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            found |= {f"{field.name}.{name}": kind for name, kind in leaves(value).items()}
        else:
            found[field.name] = kinds[field.name]
    return found


def read(config: Any, given: Mapping[str, Any], source: str = "") -> dict[str, Any]:
    """Full name -> typed value, from a user's names and values; UserErrors start with `source`."""
    kinds = leaves(config)
    values: dict[str, Any] = {}
    where = f"{source}: " if source else ""
    for key, value in _flat(given, kinds):
        name = _find(key, kinds, where)
        if name in values:
            raise UserError(f"{where}{name} is set twice.")
        values[name] = read_value(name, value, kinds[name], where)
    return values


def read_value(name: str, value: Any, kind: Any, where: str = "") -> Any:
    """One value as its type; text is parsed, anything else must already have that type."""
    try:
        return _convert(value, kind)
    except _Mismatch:
        old = explain_old_value(name, value)
        raise UserError(f"{where}{name} must be {_describe(kind)}, got {value!r}.{old}") from None


def apply(config: T, values: Mapping[str, Any]) -> T:
    """The config with these settings, by full name; every group is built once, so it validates the final values."""
    changes: dict[str, Any] = {}
    groups: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        head, dot, rest = name.partition(".")
        if dot:
            groups.setdefault(head, {})[rest] = value
        else:
            changes[head] = value
    changes |= {head: apply(getattr(config, head), inner) for head, inner in groups.items()}
    return dataclasses.replace(config, **changes)  # type: ignore[type-var]


def short_name(name: str, names: Collection[str]) -> str:
    """The shortest name of a setting: its last component, if that is found to be this one."""
    last = name.rpartition(".")[2]
    with contextlib.suppress(UserError):
        if _find(last, names, "") == name:
            return last
    return name.removeprefix(f"{_ALGORITHM}.")


def choices(kind: Any) -> list[str]:
    """The values of a setting that takes only certain ones; empty for others."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Literal:
        return [str(choice) for choice in args]
    if origin in (Union, UnionType):
        listed = [["true", "false"] if part is bool else choices(part) for part in args if part is not NoneType]
        return [choice for each in listed for choice in each] if all(listed) else []
    return []


def to_plain(config: Any) -> dict[str, Any]:
    """The settings as nested dicts, lists and plain values, for YAML and JSON."""
    plain: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        if "live" in field.metadata:  # such as a factory, which may be a dataclass itself
            continue
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            plain[field.name] = to_plain(value)
        else:
            plain[field.name] = list(value) if isinstance(value, tuple) else value
    return plain


def split_items(items: Iterable[str], option: str = "--set") -> dict[str, str]:
    """Items of an option, written key=value."""
    given: dict[str, str] = {}
    for item in items:
        key, equals, text = (part.strip() for part in item.partition("="))
        if not equals or not key:
            raise UserError(f"{option} takes key=value, got {item!r}.")
        if key in given:
            raise UserError(f"{option} names {key!r} twice.")
        given[key] = text
    return given


def _flat(given: Mapping[Any, Any], kinds: Collection[str], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in given.items():
        name = f"{prefix}{key}".replace("-", "_")
        if value is None or (isinstance(value, Mapping) and not value):
            if not _inside(name, kinds):  # a group whose settings are all commented out
                yield name, value
        elif isinstance(value, Mapping) and name not in kinds:
            yield from _flat(value, kinds, f"{name}.")
        else:
            yield name, value


def _find(key: str, names: Collection[str], where: str) -> str:
    if key in names:
        return key
    wanted = key.split(".")
    found = [name for name in names if _shortens(wanted, name.split("."))]
    own = [name for name in found if name == f"{_ALGORITHM}.{key}"]  # the algorithm's own setting comes first
    if len(found) == 1 or own:
        return (own or found)[0]
    if found:
        raise UserError(f"{where}{key} is ambiguous; write {one_of(found)}.")
    group = _inside(key, names)
    if group:
        raise UserError(f"{where}{key} is a group of settings; set {one_of(group)}.")
    raise UserError(f"{where}No setting {key!r}; {explain_setting(key, names)}")


def _inside(group: str, names: Collection[str]) -> list[str]:
    return [name for name in names if f".{group}." in f".{name}"]


def _shortens(wanted: list[str], parts: list[str]) -> bool:
    """Whether `wanted` is `parts` with some of them, but not the last, omitted."""
    rest = iter(parts)
    return wanted[-1] == parts[-1] and all(part in rest for part in wanted)


def _convert(value: Any, kind: Any) -> Any:
    """The value as this type, text parsed; _Mismatch if it does not fit."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return _one_of(value, args)
    if origin is tuple:
        return _tuple(value, args)
    if origin is dict:
        return _plain_mapping(value)
    return _scalar(value, kind)


def _one_of(value: Any, kinds: tuple[Any, ...]) -> Any:
    if NoneType in kinds and (value is None or (isinstance(value, str) and value.lower() in _NOTHING)):
        return None
    for kind in kinds:
        if kind is not NoneType:
            try:
                return _convert(value, kind)
            except _Mismatch:
                continue
    raise _Mismatch


def _tuple(value: Any, kinds: tuple[Any, ...]) -> tuple[Any, ...]:
    if isinstance(value, str):
        text = value.strip().removeprefix("[").removesuffix("]").removeprefix("(").removesuffix(")").strip(" ,")
        value = text.split(",") if text else []
    items = list(value) if isinstance(value, list | tuple) else [value]
    if kinds[-1] is Ellipsis:
        kinds = kinds[:1] * len(items)
    if len(kinds) != len(items):
        raise _Mismatch
    return tuple(_convert(item, kind) for item, kind in zip(items, kinds, strict=True))


def _plain_mapping(value: Any) -> dict[str, Any]:
    if isinstance(value, str):  # JSON, such as {"opponent": "random"}
        try:
            value = json.loads(value)
        except ValueError:
            raise _Mismatch from None
    plain = _plain(value)
    if not isinstance(plain, dict):
        raise _Mismatch
    return plain


def _plain(value: Any) -> Any:
    """A value that YAML restores unchanged; tuples become lists."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _plain(item) for key, item in value.items()}
    raise _Mismatch


def _scalar(value: Any, kind: Any) -> Any:
    """A number, boolean, text or choice as msgspec reads it; also shell and YAML spellings, and NumPy types."""
    if isinstance(value, str):
        if kind is bool:
            value = _BOOLEANS.get(value.lower(), value)
        elif kind is int:
            value = _UNIT.sub(lambda unit: _EXPONENTS[unit[0].lower()], value.strip().replace("_", ""))
        elif kind is float:
            with contextlib.suppress(ValueError):
                value = float(value)  # msgspec does not read .5
        elif kind is not str:
            value = value.lower()
    elif kind is bool and not isinstance(value, bool):  # msgspec takes 0 and 1
        raise _Mismatch
    elif not isinstance(value, bool | int | float) and isinstance(value, numbers.Real):
        value = int(value) if isinstance(value, numbers.Integral) else float(value)
    try:
        found = msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError:
        raise _Mismatch from None
    if isinstance(found, float) and not math.isfinite(found):
        raise _Mismatch
    return found


def _describe(kind: Any) -> str:
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return " or ".join("none" if part is NoneType else _describe(part) for part in args)
    if origin is Literal:
        return one_of([str(choice) for choice in args])
    if origin is tuple:
        return f"a list such as {'64,64' if args[0] is int else 'a,b'}, where each item is {_describe(args[0])}"
    if origin is dict:
        return "a mapping (JSON if given as a string) of names to numbers, strings, booleans, null, or lists of these"
    return {int: "an integer", float: "a number", bool: "true or false", str: "a string"}[kind]
