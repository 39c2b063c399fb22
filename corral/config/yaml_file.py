"""YAML files of settings: a mapping without repeated keys, in which `8:64` is text."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from corral.core.errors import UserError

_TEXT = "tag:yaml.org,2002:str"
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file; UserError if there is none."""
    import yaml

    try:
        data = yaml.load(path.read_text(encoding="utf-8"), _loader())
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UserError(f"Cannot read {path}: {reason}.") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" in line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "not YAML"
        raise UserError(f"{path} is not valid YAML{line}: {problem}.") from error
    if data is None:
        return {}
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise UserError(f"{path} must hold settings as `name: value` lines.")
    return data


@cache
def _loader() -> Any:
    """YAML's safe loader with two changes.

    A repeated key is an error, where the plain loader silently takes the last. A schedule such as 8:32 is text, where
    YAML 1.1 reads it in base 60, as 512.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen: set[str] = set()
            for key, _ in node.value:
                if key.tag == _TEXT:
                    if key.value in seen:
                        raise yaml.constructor.ConstructorError(None, None, f"{key.value} is set twice", key.start_mark)
                    seen.add(key.value)
            return super().construct_mapping(node, deep)

        def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
            tag = super().resolve(kind, value, implicit)  # type: ignore[no-untyped-call]
            return _TEXT if tag in _NUMBERS and ":" in value else tag

    return Loader
