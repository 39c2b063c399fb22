"""`events.jsonl`: events of a run, one JSON object per line, with a bounded number of lines."""

from __future__ import annotations

import contextlib
import io
import json
import math
from collections import Counter
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from corral.core.errors import RunFailed
from corral.core.log import Repeats
from corral.envs.supervision import without_numbers
from corral.runs.folder import RunFolder, append_line, write_failed

LIMIT = 1000


class EventLog:
    """Appends {time, env_steps, kind, text, ...} lines; a resumed run continues the counts.

    The first 1000 of a kind are written. Later ones are only counted: a line with the `count` follows each time it has
    doubled, and when the log is closed.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._path = folder.events_jsonl
        self._counts = count_events(folder.events_jsonl)
        self._written = Counter(self._counts)
        self._steps: dict[str, int] = {}
        self._similar = Repeats[tuple[str, str]]()
        try:
            self._file = io.FileIO(self._path, "ab")  # unbuffered: a line is in the file when add returns
        except OSError as error:
            raise write_failed(self._path, error.strerror) from error
        if self._file.tell() and not self._path.read_bytes().endswith(b"\n"):
            append_line(self._path, self._file, b"\n")  # after a line truncated by a kill

    def add(self, kind: str, text: str, *, env_steps: int = 0, **fields: Any) -> None:
        self._counts[kind] += 1
        self._steps[kind] = env_steps
        count = self._counts[kind]
        if count <= LIMIT:
            self._put({"time": _now(), "env_steps": int(env_steps), "kind": kind, "text": text} | fields)
            self._written[kind] = count
        elif count >= 2 * self._written[kind]:
            self._put_count(kind)

    def add_similar(self, kind: str, text: str, *, env_steps: int = 0) -> None:
        """As `add`; of texts that differ only in numbers, write the first, then one each time their number has doubled,
        and one when the log is closed, with that number as `similar`.
        """
        self._counts[kind] += 1
        self._steps[kind] = env_steps
        key = f"{kind} {without_numbers(text)}"
        similar = self._similar.count(key, (kind, text)) if len(self._similar) < LIMIT else 0
        if similar:
            self._put_similar(kind, text, similar)

    def _put_similar(self, kind: str, text: str, similar: int) -> None:
        fields: dict[str, Any] = {"kind": kind, "text": text}
        if similar > 1:
            fields["similar"] = similar
        if self._written[kind] != self._counts[kind] - 1:
            fields["count"] = self._counts[kind]
        self._put({"time": _now(), "env_steps": int(self._steps[kind])} | fields)
        self._written[kind] = self._counts[kind]

    def close(self) -> None:
        """Write the counts that are not in the file yet, and close it."""
        with contextlib.suppress(RunFailed), contextlib.closing(self._file):  # a full disk has ended the run already
            for similar, (kind, text) in self._similar.rest():
                self._put_similar(kind, text, similar)
            for kind, count in self._counts.items():
                if count != self._written[kind]:
                    self._put_count(kind)

    def _put_count(self, kind: str) -> None:
        count = self._counts[kind]
        text = f"{count} in all; only the first {LIMIT} are written out"
        steps = int(self._steps.get(kind, 0))
        self._put({"time": _now(), "env_steps": steps, "kind": kind, "text": text, "count": count})
        self._written[kind] = count

    def _put(self, fields: dict[str, Any]) -> None:
        for key, value in fields.items():
            if isinstance(value, float) and not math.isfinite(value):  # JSON has no such numbers
                fields[key] = str(value)
        line = json.dumps(fields, default=str, allow_nan=False).encode() + b"\n"
        append_line(self._path, self._file, line)


def read_events(path: str | Path) -> list[dict[str, Any]]:
    """The lines of an `events.jsonl`, without a truncated one."""
    try:
        lines = Path(path).read_bytes().splitlines()
    except FileNotFoundError:
        return []
    events = []
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and "kind" in event:
            events.append(event)
    return events


def count_events(path: str | Path) -> Counter[str]:
    """Number of events of each kind, including those that were only counted."""
    counts: Counter[str] = Counter()
    for event in read_events(path):
        kind = event["kind"]
        counts[kind] = max(int(event["count"]), counts[kind]) if "count" in event else counts[kind] + 1
    return counts


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")
