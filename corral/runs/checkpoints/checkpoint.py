"""Checkpoints: directories that are written atomically and verified by hashes.

checkpoints/step_000012345/{policy,replay,state}.{safetensors,json}, manifest.json
checkpoints/latest -> step_000012345          checkpoints/best -> step_000010240
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from corral.config.migrate import rename_envs
from corral.core.errors import RunFailed, UserError
from corral.core.portable import point, pointed_to, replace_file, sync_folder
from corral.runs.checkpoints.state_files import (
    branch_of,
    decode,
    encode,
    files_of,
    read_branch,
    read_state,
    size_and_hash,
    write_state,
)
from corral.runs.folder import RunFolder, atomic_write

FORMAT = 1
_MIGRATIONS: dict[int, Callable[[dict[str, Any], dict[str, Any]], tuple[dict[str, Any], dict[str, Any]]]] = {}
"""Format version -> migrates its (state, meta) to the next version."""
POLICY, _REPLAY = "policy", "replay"
_SEPARATE_FILES = {POLICY: ("trainer", "learner", "model"), _REPLAY: ("trainer", "store")}
"""Branches of the state in their own files: the policy, and what may be much larger than the rest."""
MANIFEST = "manifest.json"
_NAME = re.compile(r"step_(\d+)(?:_(\d+))?")
_POLICY_ONLY = "policy_"  # name of a checkpoint with nothing but a policy that was evaluated later
_TEMPORARY = ".tmp-"
_LARGE = 1 << 20  # bytes of a replay buffer that is kept once
_ATTEMPTS = 5

_log = logging.getLogger("corral.runs")


class BrokenCheckpoint(UserError):
    """A checkpoint that is truncated, changed or incomplete."""


def save(
    folder: RunFolder, state: dict[str, Any], step: int, meta: dict[str, Any], *, keep: int, best: bool = False
) -> Path:
    """Write a checkpoint, point `latest` (and `best`, if set) to it, and remove all but the last `keep`.

    The target of `best` is never removed. Only the new one keeps its replay buffer, if that is large: a run that has to
    resume from an earlier one, because this is broken, starts with an empty buffer. Checkpoints after `step` are left
    over from before a resume and are removed. Only the process that has locked the run may call this. RunFailed if the
    disk is full.
    """
    folder.checkpoints.mkdir(exist_ok=True)
    _sweep(folder.checkpoints)
    same = [_order(name)[1] for name in _listed(folder.checkpoints) if _order(name)[0] == step]
    target = folder.checkpoints / (f"step_{step:09d}" + (f"_{max(same) + 1}" if same else ""))
    _write(target, state, step, meta)
    for name in ("latest", "best") if best else ("latest",):
        point(folder.checkpoints / name, target.name)
    sync_folder(folder.checkpoints)
    _prune(folder.checkpoints, target, keep)
    return target


def save_policy(folder: RunFolder, weights: dict[str, Any], step: int, meta: dict[str, Any]) -> None:
    """Write the policy of an earlier step and point `best` to it; a run cannot be resumed from it."""
    _sweep(folder.checkpoints)
    target = folder.checkpoints / f"{_POLICY_ONLY}{step:09d}"
    shutil.rmtree(target, ignore_errors=True)  # of before a resume
    _write(target, {"trainer": {"learner": {"model": weights}}}, step, meta)
    point(folder.checkpoints / "best", target.name)
    sync_folder(folder.checkpoints)
    _remove_policies(folder.checkpoints, target.name)


def _write(target: Path, state: dict[str, Any], step: int, meta: dict[str, Any]) -> None:
    """Write a checkpoint under another name and rename it; RunFailed if the disk is full."""
    temporary = target.with_name(f"{_TEMPORARY}{target.name}")
    try:
        temporary.mkdir()
        manifest = {
            "format": FORMAT,
            "step": step,
            "saved": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "meta": encode(meta, None),
            "files": write_state(temporary, state, _SEPARATE_FILES),
        }
        _write_manifest(temporary, manifest)
        replace_file(temporary, target)
    except OSError as error:
        _sweep(target.parent)
        raise RunFailed(
            f"Checkpoint {target} cannot be written ({error.strerror}); earlier ones are intact: free some disk space, "
            "then `corral resume` the run."
        ) from error


def load(
    folder: RunFolder, which: str = "latest", *, only: str | None = None, note: Callable[[str], None] | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """State and meta of a checkpoint: `latest`, `best` or a directory name; meta includes the `step`.

    With `only=POLICY`, only the state of the policy's network is read. A broken checkpoint is reported in the log and
    by `note`, and the newest intact one before it is used.
    """
    gone: set[str] = set()
    for _ in range(_ATTEMPTS):
        broken: list[str] = []
        for name in _candidates(folder.checkpoints, which):
            path = folder.checkpoints / name
            try:
                result = load_checkpoint(path, only)
            except BrokenCheckpoint as error:
                if not path.is_dir() and name not in gone:  # the run, still training, has removed it
                    gone.add(name)
                    break
                broken.append(str(error))
                continue
            _report(broken, name, note)
            return result
        else:
            raise UserError(_none_intact(folder, which, broken))
    raise UserError(f"{folder.path} deletes its checkpoints faster than they can be read: raise keep_checkpoints.")


def load_checkpoint(path: str | Path, only: str | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """State, or one branch of it, and meta of a checkpoint; BrokenCheckpoint if a hash differs."""
    path = Path(path)
    manifest = _read_manifest(path)
    version, files = manifest["format"], manifest["files"]
    if version > FORMAT:
        raise UserError(
            f"{path} was written by a newer version of Corral (checkpoint format {version}, this one reads up to "
            f"{FORMAT}): upgrade Corral."
        )
    alone = only is not None and version == FORMAT and files_of(only)[0] in files
    try:
        for name in files_of(only or "") if alone else files:
            _check_file(path / name, files[name])
        state = read_branch(path, only or "") if alone else read_state(path, files)
    except OSError as error:
        raise BrokenCheckpoint(f"Checkpoint {path} cannot be read ({error}): use another one.") from error
    meta = decode(manifest["meta"], {})
    for old in range(version, FORMAT):
        state, meta = _MIGRATIONS[old](state, meta)
    rename_envs(state)
    if only is not None and not alone:
        state = branch_of(state, _SEPARATE_FILES[only])
    return state, meta | {"step": manifest["step"]}


def _write_manifest(path: Path, manifest: dict[str, Any]) -> None:
    signed = manifest | {"sha256": _manifest_hash(manifest)}
    atomic_write(path / MANIFEST, json.dumps(signed, indent=1, allow_nan=False))
    sync_folder(path)


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads((path / MANIFEST).read_bytes())
        whole = manifest.pop("sha256") == _manifest_hash(manifest) and isinstance(manifest["format"], int)
    except FileNotFoundError:
        raise BrokenCheckpoint(f"{path} is not a complete checkpoint (no {MANIFEST}): use another one.") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        whole = False
    if not whole:
        raise BrokenCheckpoint(f"Checkpoint {path} is broken ({MANIFEST} was changed): use another one.")
    return manifest


def _manifest_hash(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _check_file(path: Path, expected: dict[str, Any]) -> None:
    size = path.stat().st_size if path.exists() else None
    if size is None:
        reason = "is missing"
    elif size != expected["size"]:
        reason = f"has {size:,} of {expected['size']:,} bytes"
    elif size_and_hash(path) != expected:
        reason = "was changed"
    else:
        return
    raise BrokenCheckpoint(f"Checkpoint {path.parent} is broken ({path.name} {reason}): use another one.")


def _report(broken: list[str], used: str, note: Callable[[str], None] | None) -> None:
    for reason in broken:
        text = f"{reason.removesuffix(': use another one.')}; {used} is used instead."
        _log.warning(text)
        if note is not None:
            note(text)


def _none_intact(folder: RunFolder, which: str, broken: list[str]) -> str:
    if not broken:
        if which == "latest":
            return f"{folder.path} has no checkpoint yet: let it train longer, or start it again."
        return f"{folder.path} has no checkpoint {which!r}: try latest, or a name from {folder.checkpoints}."
    return f"{folder.path} has no usable checkpoint; the first error: {broken[0]}"


def _candidates(checkpoints: Path, which: str) -> list[str]:
    """The requested checkpoint and those before it, newest first."""
    names = sorted(_listed(checkpoints), key=_order, reverse=True)
    wanted = pointed_to(checkpoints / which) or which
    if wanted.startswith(_POLICY_ONLY):
        return [wanted, *names] if (checkpoints / wanted).exists() else names
    if _NAME.fullmatch(wanted) is None:
        return names if which == "latest" else []
    if wanted not in names and which not in ("latest", "best"):
        return []
    return [wanted, *(name for name in names if _order(name) < _order(wanted))]


def _listed(checkpoints: Path) -> list[str]:
    try:
        return [name for name in os.listdir(checkpoints) if _NAME.fullmatch(name)]
    except FileNotFoundError:
        return []


def _order(name: str) -> tuple[int, int]:
    match = _NAME.fullmatch(name)
    assert match is not None
    return int(match[1]), int(match[2] or 1)


def _prune(checkpoints: Path, newest: Path, keep: int) -> None:
    best_name = pointed_to(checkpoints / "best") or ""
    step = _order(newest.name)[0]
    past = sorted((n for n in _listed(checkpoints) if _order(n)[0] < step), key=_order)
    last = past[len(past) - max(keep - 1, 0) :]
    for name in _listed(checkpoints):
        if name in (best_name, *last) and name != newest.name:
            _drop_replay(checkpoints / name)
        elif name != newest.name:
            # Renamed first, so that a removal that is killed leaves no broken checkpoint.
            with contextlib.suppress(OSError):
                (checkpoints / name).rename(checkpoints / f"{_TEMPORARY}{name}")
    _remove_policies(checkpoints, best_name)
    _sweep(checkpoints)


def _remove_policies(checkpoints: Path, best_name: str) -> None:
    for path in checkpoints.glob(f"{_POLICY_ONLY}*"):
        if path.name != best_name:
            shutil.rmtree(path, ignore_errors=True)


def _drop_replay(path: Path) -> None:
    """Remove a large replay buffer from a checkpoint; the manifest first, so that it is valid at all times."""
    with contextlib.suppress(OSError, BrokenCheckpoint):
        manifest = _read_manifest(path)
        files, replay = dict(manifest["files"]), files_of(_REPLAY)
        if sum(files[name]["size"] for name in replay if name in files) > _LARGE:
            files = {name: facts for name, facts in files.items() if name not in replay}
            _write_manifest(path, manifest | {"files": files})
        for name in set(replay) - set(files):
            (path / name).unlink(missing_ok=True)


def _sweep(checkpoints: Path) -> None:
    """Remove leftovers of a save that was killed."""
    for entry in checkpoints.glob(f"{_TEMPORARY}*"):
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)
