"""The run directory: its files, its origin, and a lock that lets one process train it at a time."""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from corral.config.migrate import FORMAT, OLD_FILES, read_config
from corral.config.trust import sign
from corral.core.errors import RunFailed, UserError
from corral.core.file_lock import lock
from corral.core.portable import replace_file
from corral.core.types import EnvSpec

_CONFIG, _INFO, _LOCK = "config.yaml", "run.json", ".lock"
_OWN = {
    _CONFIG, _INFO, _LOCK, "metrics.csv", "events.jsonl", "processes.json", "checkpoints", "videos", *OLD_FILES,
}  # fmt: skip
_TENSORBOARD = "events.out.tfevents."
_REPLACED = ".tmp-replaced"  # what --overwrite replaces, until the new run has made a step
_GIT_TIMEOUT_S = 5.0
_LOCK_ATTEMPTS = 5
_locked: dict[Path, int] = {}
"""Runs locked by a process of this program -> its pid. A file lock does not exclude its own process."""


@dataclass(frozen=True)
class RunFolder:
    """A run directory. `config` is the resolved configuration, `info` the versions and machine that made it.

    `notes` name settings of an earlier version that were lost when `config.yaml` was read. The folder holds
    `config.yaml`, `run.json`, `metrics.csv`, TensorBoard's event files, `events.jsonl` and `checkpoints/`. `run.json`
    is written last, so a directory that has it is complete.
    """

    path: Path
    config: dict[str, Any]
    info: dict[str, Any]
    notes: tuple[str, ...] = ()

    @classmethod
    def create(cls, path: str | Path, config: dict[str, Any], *, overwrite: bool = False) -> RunFolder:
        """Create a new run; `overwrite` replaces an existing run, but no foreign files. That run comes back with
        `discard`, and is removed by `drop_replaced`.
        """
        path = Path(path)
        try:
            if (path / _INFO).exists() and not overwrite:
                raise UserError(
                    f"{path} already holds a run: continue it with `corral resume {path}`, replace it with "
                    "--overwrite, or choose a different --run-dir."
                )
            path.mkdir(parents=True, exist_ok=True)
            foreign = sorted(entry.name for entry in path.iterdir() if not _is_own(entry.name))
        except OSError as error:
            raise UserError(f"{path} cannot be used as a run directory: {error.strerror}.") from error
        if foreign and not (path / _INFO).exists():
            raise UserError(f"{path} is not a run and contains {foreign[0]!r}: choose a new or empty --run-dir.")
        with _lock(path):
            info = _gather_info() | {"proof": sign(config)}
            try:
                if (path / _INFO).exists() and not (path / _REPLACED).exists():
                    _set_aside(path)
                _clear(path)
                (path / "checkpoints").mkdir()
                atomic_write(path / _CONFIG, _to_yaml(config))
                atomic_write(path / _INFO, json.dumps(info, indent=1) + "\n")
            except OSError as error:
                with contextlib.suppress(OSError):
                    _bring_back(path)
                raise RunFailed(f"{path} cannot be written: {error.strerror}.") from error
        return cls(path, config, info)

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """An existing run; UserError if there is none, or this version cannot read it."""
        path = Path(path)
        try:
            info = json.loads((path / _INFO).read_text(encoding="utf-8"))
            found = info["format"]
        except (FileNotFoundError, NotADirectoryError):
            raise UserError(_why_no_run(path)) from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path / _INFO} cannot be read ({error}): restore it, or use another run.") from None
        if not isinstance(found, int) or not 1 <= found <= FORMAT:
            age = "a newer" if isinstance(found, int) and found > FORMAT else "another"
            raise UserError(
                f"{path} is a run of format {found}, written by {age} version of Corral "
                f"({info.get('versions', {}).get('corral-rl', 'unknown')}); this version reads formats 1 to {FORMAT}: "
                "use the other version."
            )
        found = read_config(path / _CONFIG)
        return cls(path, found.settings, info, found.notes)

    def write_config(self, config: dict[str, Any]) -> RunFolder:
        """Replace `config.yaml`, e.g. for more steps; returns the run with the new configuration."""
        info = self.info | {"format": FORMAT, "proof": sign(config)}
        atomic_write(self.path / _CONFIG, _to_yaml(config))
        atomic_write(self.path / _INFO, json.dumps(info, indent=1) + "\n")
        return replace(self, config=config, info=info, notes=())

    @property
    def algo(self) -> str:
        return str(self.config.get("algo", "?"))

    @property
    def env(self) -> str:
        return str(self.config.get("env", "?"))

    def discard(self) -> None:
        """Remove a run that never began, except foreign files and their directory; the one that it replaced returns."""
        if _bring_back(self.path):
            return
        _clear(self.path)
        (self.path / _LOCK).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.path.rmdir()

    def drop_replaced(self) -> None:
        """Remove the run that this one replaces."""
        shutil.rmtree(self.path / _REPLACED, ignore_errors=True)

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def metrics_csv(self) -> Path:
        return self.path / "metrics.csv"

    @property
    def processes_json(self) -> Path:
        return self.path / "processes.json"

    @property
    def events_jsonl(self) -> Path:
        return self.path / "events.jsonl"

    def lock(self) -> contextlib.AbstractContextManager[None]:
        """Lock the run for this process alone, not its children; UserError with the pid of a process that trains it."""
        return _lock(self.path)

    def holder(self) -> int | None:
        """The pid of the process that trains the run, if any."""
        pid = _locked.get(self.path.resolve())
        if pid == os.getpid():  # opening and closing the file here would release the lock
            return pid
        try:
            file = os.open(self.path / _LOCK, os.O_RDONLY)
        except OSError:
            return None
        try:
            lock(file, shared=True)
        except OSError:
            return _pid_in(file)
        finally:
            os.close(file)
        return None


def _is_own(name: str) -> bool:
    return name in _OWN or name.startswith((_TENSORBOARD, ".tmp-"))


def _clear(path: Path) -> None:
    """Remove a run's files; `run.json` first, so that a removal that is killed leaves no run."""
    (path / _INFO).unlink(missing_ok=True)
    for entry in _files(path):
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _files(path: Path) -> list[Path]:
    return [entry for entry in path.iterdir() if _is_own(entry.name) and entry.name not in (_LOCK, _REPLACED)]


def _set_aside(path: Path) -> None:
    """Move a run's files into a folder."""
    (path / _REPLACED).mkdir()
    for entry in _files(path):
        entry.rename(path / _REPLACED / entry.name)


def _bring_back(path: Path) -> bool:
    """Replace a run's files by those that were set aside for it, if there are any."""
    if not (path / _REPLACED).exists():
        return False
    _clear(path)
    for entry in (path / _REPLACED).iterdir():
        entry.rename(path / entry.name)
    (path / _REPLACED).rmdir()
    return True


def _why_no_run(path: Path) -> str:
    if not path.exists():
        return f"There is no run at {path}: give the --run-dir of a `corral train`."
    inside = sorted(path.glob(f"*/{_INFO}"))
    if inside:
        return f"{path} is not a run but contains {len(inside)}: choose one of them, such as {inside[0].parent}."
    return f"{path} is not a run (it has no {_INFO}): give the --run-dir of a `corral train`."


def atomic_write(path: Path, text: str) -> None:
    """Replace a file atomically, synced to disk."""
    temporary = path.with_name(f".tmp-{path.name}")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    replace_file(temporary, path)


def append_line(path: Path, file: io.FileIO, line: bytes) -> None:
    """Append to an unbuffered file; RunFailed if not all of it is written."""
    try:
        reason = None if file.write(line) == len(line) else "No space left on device"
    except OSError as error:
        reason = error.strerror or str(error)
    if reason is not None:
        raise write_failed(path, reason)


def write_failed(path: Path, reason: str | None) -> RunFailed:
    """The error of a run whose file cannot be written."""
    return RunFailed(f"{path} cannot be written ({reason}): free disk space and `corral resume` the run.")


def _to_yaml(config: dict[str, Any]) -> str:
    """YAML with one setting per line, including lists."""
    import yaml

    def on_one_line(dumper: Any, values: Any) -> Any:
        return dumper.represent_sequence("tag:yaml.org,2002:seq", values, flow_style=True)

    dumper: Any = type("Dumper", (yaml.SafeDumper,), {})  # its own class, because representers are stored in the class
    for kind in (list, tuple):
        dumper.add_representer(kind, on_one_line)
    text: str = yaml.dump({"format": FORMAT} | config, Dumper=dumper, sort_keys=False, allow_unicode=True)
    return text


def _gather_info() -> dict[str, Any]:
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("corral-rl", "torch", "numpy", "gymnasium"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return {
        "format": FORMAT,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": versions,
        "git": _git(),
        "machine": {
            "host": platform.node(),
            "system": platform.platform(),
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
        },
        "argv": list(sys.argv),
    }


def _git() -> dict[str, Any] | None:
    """The commit of the working directory and whether files differ from it; None outside a repository."""

    def ask(*args: str) -> str:
        run = subprocess.run(
            ["git", *args], capture_output=True, stdin=subprocess.DEVNULL, text=True, check=True, timeout=_GIT_TIMEOUT_S
        )
        return run.stdout.strip()

    try:
        sha = ask("rev-parse", "HEAD")
        return {"sha": sha, "dirty": bool(ask("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError):
        return None


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    place = path.resolve()
    if _locked.get(place) == os.getpid():
        raise UserError(f"This process ({os.getpid()}) is training {path} already: wait, or choose another --run-dir.")
    try:
        file = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}.") from error
    for attempt in range(_LOCK_ATTEMPTS):
        try:
            lock(file)
            break
        except OSError:
            if attempt < _LOCK_ATTEMPTS - 1:
                time.sleep(0.05)  # it may be held by `holder`, briefly
                continue
            pid = _pid_in(file) or "(unknown)"
            os.close(file)
            raise UserError(f"Process {pid} is training {path}: stop it, or choose a different --run-dir.") from None
    _locked[place] = os.getpid()
    try:
        os.ftruncate(file, 0)
        with contextlib.suppress(OSError):  # a full disk: only the pid in another's message is missing
            os.lseek(file, 0, os.SEEK_SET)
            os.write(file, f"{os.getpid()}\n".encode())
        yield
    finally:
        del _locked[place]
        os.close(file)


def _pid_in(file: int) -> int | None:
    os.lseek(file, 0, os.SEEK_SET)
    text = os.read(file, 32).decode(errors="replace").strip()
    return int(text) if text.isdigit() else None


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary path that replaces `path` atomically on success. UserError if that is impossible."""
    unfinished = path.with_name(f".tmp-{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        open(unfinished, "wb").close()
        yield unfinished
        replace_file(unfinished, path)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}.") from error
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink()


def require_same_env(found: EnvSpec, trained: EnvSpec) -> None:
    """UserError if the spaces differ from those that a run was trained on."""
    for what in ("observation", "action"):
        now, then = getattr(found, what), getattr(trained, what)
        if now != then:
            raise UserError(
                f"{found.name} has {what}s {now.space}, but this run was trained on {then.space}: use the environment "
                "it was trained on, or start a new run."
            )
