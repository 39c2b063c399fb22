"""Requests about states to several simulators at once: sent to all, then waited for, and put together row by row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from corral.core.encoding import Buffer
from corral.core.errors import EnvFailed, UserError
from corral.core.types import Array
from corral.link import protocol as clp
from corral.link.client.fleet import Fleet
from corral.link.client.session import Session, Simulator
from corral.link.message import BadMessage, Message

_POLL_S = 0.25
Rows = slice | Array


@dataclass(slots=True)
class Part:
    """Rows of a call that go to one simulator in one request."""

    session: Session
    rows: Rows
    count: int


class Table:
    """What simulators said of the rows of a call."""

    def __init__(self, simulator: Simulator, count: int, *, obs: bool = True):
        leaves = simulator.spec.observation.leaves if obs else ()
        self.reward = np.zeros((count, simulator.hello.players))
        self.flags, self.to_play = np.zeros(count, np.uint8), np.zeros(count, np.int8)
        self.obs = [np.zeros((count, *leaf.shape), leaf.dtype) for leaf in leaves]
        self.failed, self.lost, self.words = np.zeros(count, np.bool_), np.zeros(count, np.bool_), ""
        """Rows whose step failed, rows whose simulator is gone, and what was said of the last of either."""

    def miss(self, rows: Rows, words: str) -> None:
        """Rows of a simulator that is gone."""
        self.lost[rows], self.words = True, words

    def take(self, part: Part, reply: Message, at: int = 0) -> None:
        """The rows of a part, which begin with this frame; those whose step failed are marked."""
        simulator, rows, payload = part.session.simulator, part.rows, reply.payload[at:]
        players = simulator.hello.players
        if reply.batch != part.count or len(payload) != 1 + bool(self.obs):
            raise BadMessage(f"{reply.batch} rows in {len(payload)} frames in answer to {part.count} rows")
        reward, *_, flags, status = (table := simulator.rows.read(payload[0], part.count))[: len(table) - (players > 1)]
        if status.any():
            self.failed[rows] = _which_failed(part, status, reply)
            self.words = _words(part, int(status.nonzero()[0][-1]), status, reply)
        leaves = simulator.observation.read(payload[1], part.count) if self.obs else []
        for leaf in (reward, *leaves):
            if leaf.dtype.kind == "f" and not np.isfinite(leaf).all():
                raise BadMessage("numbers that are not finite, in a row that is not E_NOT_FINITE")
        self.reward[rows], self.flags[rows] = reward, flags
        if players > 1:
            self.to_play[rows] = np.minimum(np.maximum(table[-1], 0), players - 1)
        for place, leaf in zip(self.obs, leaves, strict=True):
            place[rows] = leaf


def split(homes: Array, sessions: Sequence[Session], most: Callable[[Session], int]) -> tuple[list[Part], list[Array]]:
    """Rows by the simulator where they belong, in parts of at most so many; and rows of simulators that are gone."""
    parts, gone = [], []
    first = homes[0]
    alone = bool((homes == first).all())
    for home in [int(first)] if alone else np.unique(homes).tolist():
        rows = np.arange(len(homes)) if alone else np.flatnonzero(homes == home)
        if home < 0 or sessions[home].lost is not None:
            gone.append(rows)
            continue
        each = most(sessions[home])
        for k in range(0, len(rows), each):
            some = rows[k : k + each]
            parts.append(Part(sessions[home], slice(k, k + len(some)) if alone else some, len(some)))
    return parts, gone


def ask(
    fleet: Fleet,
    op: int,
    parts: Sequence[tuple[Part, list[Buffer]]],
    take: Callable[[Part, Message], None],
    timeout_s: float,
    *,
    miss: Callable[[Rows, str], None] | None = None,
    flags: int = 0,
    meta: dict[str, Any] | None = None,
) -> None:
    """Ask for all parts at once, and `take` every answer; EnvFailed when a simulator refuses.

    Parts of simulators that are lost meanwhile are `miss`ed, where somebody can do without them; else EnvFailed.
    """
    wrong: list[Exception] = []
    waiting = dict(enumerate(part for part, _ in parts))

    def done(k: int, reply: Message) -> None:
        part = waiting[k]
        try:
            if reply.flags & clp.FAILED:
                status = clp.status_name(reply.status)
                raise EnvFailed(f"{part.session.name} refused {clp.Op(op).name}: {status}, {reply.text}.")
            take(part, reply)
        except (EnvFailed, UserError) as error:
            wrong.append(error)
        del waiting[k]  # not where it was a BadMessage: the fleet gives the simulator up for that, and so it is lost

    with fleet.lock:
        for k, (part, payload) in enumerate(parts):
            part.session.submit(op, part.count, payload, partial(done, k), deadline_s=timeout_s, flags=flags, meta=meta)
    while waiting:  # deadlines of requests end it: a session that does not keep them is lost
        for k, part in list(waiting.items()):
            if part.session.lost is not None:
                if miss is None:
                    raise EnvFailed(f"{clp.Op(op).name}: {part.session.lost}.")
                miss(part.rows, f"{clp.Op(op).name}: {part.session.lost}")
                del waiting[k]
        if waiting:
            fleet.poll(_POLL_S)
    if wrong:
        raise wrong[0]


def _which_failed(part: Part, status: Array, reply: Message) -> Array:
    """Rows whose environment failed; what is wrong with a request or its simulator is raised."""
    failed: Array = (status == clp.Status.E_ENV) | (status == clp.Status.E_NOT_FINITE)
    other = np.flatnonzero((status != 0) & ~failed)
    if not len(other):
        return failed
    row = int(other[0])
    if status[row] == clp.Status.E_SNAPSHOT_FULL:
        raise UserError(
            f"{part.session.name} keeps as many states as it may ({_said(row, reply)}): search with fewer simulations "
            "or trees, run more simulators, or let each keep more with env_kwargs snapshot_mb."
        )
    raise EnvFailed(_words(part, row, status, reply) + ".")


def _words(part: Part, row: int, status: Array, reply: Message) -> str:
    return f"{part.session.name}: {clp.status_name(int(status[row]))} {_said(row, reply)}".rstrip()


def _said(row: int, reply: Message) -> str:
    said = (reply.meta or {}).get("rows", {})
    return str(said.get(str(row), "")) if isinstance(said, dict) else ""
