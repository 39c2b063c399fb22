"""Which code and commands of a run folder may run here: those that this user's own command wrote, or that are trusted.

A run folder names its environment, and may name more code, so opening somebody else's run could execute anything. A run
that this user's commands made carries an HMAC of what it names, with a key in the user's configuration folder; a flag
in the folder would prove nothing. What is trusted by hand is remembered there too.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import importlib.util
import json
import os
import re
import secrets
import shlex
import shutil
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from corral.core.errors import UserError

_OF_ENV = ("env", "env_kwargs", "eval_env_kwargs")
"""Settings that are used only where the run's environment is built."""
_OWN = re.compile(r"corral\.(envs\.suites|testing|algos|learn\.exchange)(\.\w+)*:\w+")
_DATA = re.compile(r"mcts:\d+")
_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]")
_PATHS = ("init", "token_file")
_VARIABLE = "CORRAL_TRUST"


def code_in(config: Mapping[str, Any]) -> dict[str, str]:
    """The code and commands that a run's settings name, by setting. Ids, URLs and what Corral itself has are none."""
    return {name: text for name, text in _strings(config) if _is_code(name, text)}


def sign(config: Mapping[str, Any]) -> str | None:
    """Proof that a command of this user named this code; None if there is none, or no place for a key."""
    if not code_in(config):
        return None
    try:
        key = _key(create=True)
    except OSError:  # e.g. no home in a container: CORRAL_TRUST is then the way to resume
        return None
    return _mac(key, config)


def remember(config: Mapping[str, Any]) -> None:
    """Trust the code and commands that these settings name, from now on, on this machine."""
    place = _config_folder() / "trusted"
    try:
        proof = _mac(_key(create=True), config)
        with open(place, "a", encoding="ascii") as file:
            file.write(f"{proof}\n")
    except OSError as error:
        raise UserError(f"{place} cannot be written ({error.strerror}): name the run in {_VARIABLE} instead.") from None


def is_trusted(run: Path, config: Mapping[str, Any], proof: str | None) -> bool:
    """Whether the code that the run in this folder names may run here."""
    if not code_in(config):
        return True
    places = [Path(each).resolve() for each in os.environ.get(_VARIABLE, "").split(os.pathsep) if each]
    if any(run.resolve().is_relative_to(place) for place in places):
        return True
    try:
        expected = _mac(_key(create=False), config)
    except OSError:
        return False
    remembered: list[str] = []
    with contextlib.suppress(OSError, UnicodeDecodeError):
        remembered = (_config_folder() / "trusted").read_text(encoding="ascii").split()
    return any(hmac.compare_digest(expected, str(each)) for each in (proof, *remembered) if each)


def untrusted_env(run: Path, config: Mapping[str, Any], proof: str | None) -> str:
    """Why the environment of this run must not be built, or nothing; UserError if even its other code is untrusted."""
    if is_trusted(run, config, proof):
        return ""
    found = code_in(config)
    other = {name: text for name, text in found.items() if name.partition(".")[0] not in _OF_ENV}
    if other:
        raise UserError(_refusal(run, other))
    return _refusal(run, found)


def _refusal(run: Path, found: Mapping[str, str]) -> str:
    names = ", ".join(f"{name}: {text}" for name, text in found.items())
    return (
        f"{run} runs code that no command of yours on this machine has named ({names}): look at its config.yaml; if "
        f"you trust it, give --trust once (in Python: corral.trust(run)), or set {_VARIABLE} to a folder whose runs "
        "are trusted."
    )


def _strings(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _strings(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from _strings(inner, f"{name}.{index}")


def _is_code(name: str, text: str) -> bool:
    group, _, last = name.rpartition(".")
    if last in _PATHS or _OWN.fullmatch(text) or _DATA.fullmatch(text):
        return False
    if last == "sim" and group in _OF_ENV:
        return True
    if name == "env":
        return ":" in text and "://" not in text
    if name.partition(".")[0] in _OF_ENV or name in ("algo", "data_parallel.exchange"):
        return ":" in text
    return _NAME.match(text) is not None and "://" not in text


def _mac(key: bytes, config: Mapping[str, Any]) -> str:
    """Of what is named, of the arguments it gets, and of where it is found."""
    found = code_in(config)
    arguments = {name: config.get(name) for name in _OF_ENV}
    where = {text: _origin(name, text) for name, text in found.items()}
    message = json.dumps([found, arguments, where], sort_keys=True, default=repr)
    return hmac.new(key, message.encode(), hashlib.sha256).hexdigest()


def _origin(name: str, text: str) -> str:
    """The folder of a module that is not installed, or the path of a command's program."""
    if name.endswith(".sim"):
        with contextlib.suppress(ValueError):
            program = shlex.split(text)[0]
            return str(Path(shutil.which(program) or program).absolute())
        return os.getcwd()
    spec = None
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(text.partition(":")[0].partition(".")[0])
    places = [] if spec is None else [spec.origin, *(spec.submodule_search_locations or ())]
    file = next((place for place in places if place), None)
    if spec is None or file is None:  # `import_named` looks there last
        return os.getcwd()
    paths = sysconfig.get_paths()
    installed = any(Path(file).is_relative_to(paths[kind]) for kind in ("stdlib", "purelib", "platlib"))
    is_package = spec.submodule_search_locations is not None and spec.origin is not None
    return "" if installed else str(Path(file).absolute().parents[1 if is_package else 0])


def _config_folder() -> Path:
    """The user's configuration folder of Corral."""
    base = os.environ.get("XDG_CONFIG_HOME") or (os.environ.get("APPDATA") if os.name == "nt" else None)
    return Path(base or Path.home() / ".config") / "corral"


def _key(*, create: bool) -> bytes:
    """The user's key; OSError if there is none."""
    path = _config_folder() / "key"
    try:
        key = path.read_bytes()
    except FileNotFoundError:
        if not create:
            raise
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fresh = path.with_name(f"key.{secrets.token_hex(8)}")
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secrets.token_bytes(32))
        try:
            os.link(fresh, path)  # not over the key of a process that was first
        except FileExistsError:
            pass
        except OSError:  # a file system without hard links
            os.replace(fresh, path)
        fresh.unlink(missing_ok=True)
        key = path.read_bytes()
    if len(key) < 32:
        raise OSError(f"{path} is damaged")
    return key
