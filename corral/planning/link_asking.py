"""Requests about states to several simulators at once: sent to all, then waited for, and put together row by row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from corral.encoding import Buffer
from corral.errors import EnvFailed, UserError
from corral.link import protocol as clp
from corral.link.fleet import Fleet
from corral.link.message import BadMessage, Message
from corral.link.session import Session, Simulator
from corral.types import Array

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

    def take(self, part: Part, reply: Message, at: int = 0) -> None:
        """The rows of a part, which begin with this frame; what a row failed of is raised."""
        simulator, rows, payload = part.session.simulator, part.rows, reply.payload[at:]
        players = simulator.hello.players
        if reply.batch != part.count or len(payload) != 1 + bool(self.obs):
            raise BadMessage(f"{reply.batch} rows in {len(payload)} frames in answer to {part.count} rows")
        reward, *_, flags, status = (table := simulator.rows.read(payload[0], part.count))[: len(table) - (players > 1)]
        if status.any():
            _raise_failed(part, int(status.nonzero()[0][0]), status, reply)
        leaves = simulator.observation.read(payload[1], part.count) if self.obs else []
        for leaf in (reward, *leaves):
            if leaf.dtype.kind == "f" and not np.isfinite(leaf).all():
                raise BadMessage("numbers that are not finite, in a row that is not E_NOT_FINITE")
        self.reward[rows], self.flags[rows] = reward, flags
        if players > 1:
            self.to_play[rows] = np.minimum(np.maximum(table[-1], 0), players - 1)
        for place, leaf in zip(self.obs, leaves, strict=True):
            place[rows] = leaf


def split(homes: Array, sessions: Sequence[Session], most: Callable[[Session], int]) -> list[Part]:
    """Rows by the simulator where they belong, in parts of at most so many; EnvFailed where that is gone."""
    parts = []
    first = homes[0]
    alone = bool((homes == first).all())
    for home in [int(first)] if alone else np.unique(homes).tolist():
        if home < 0:
            raise EnvFailed("States went with their simulator.")
        session = sessions[home]
        if session.lost is not None:
            raise EnvFailed(f"States went with their simulator: {session.lost}.")
        rows = np.arange(len(homes)) if alone else np.flatnonzero(homes == home)
        each = most(session)
        for k in range(0, len(rows), each):
            some = rows[k : k + each]
            parts.append(Part(session, slice(k, k + len(some)) if alone else some, len(some)))
    return parts


def ask(
    fleet: Fleet,
    op: int,
    parts: Sequence[tuple[Part, list[Buffer]]],
    take: Callable[[Part, Message], None],
    timeout_s: float,
    *,
    flags: int = 0,
    meta: dict[str, Any] | None = None,
) -> None:
    """Ask for all parts at once, and `take` every answer; EnvFailed when a simulator is lost or refuses."""
    wrong: list[Exception] = []
    left = len(parts)

    def done(part: Part, reply: Message) -> None:
        nonlocal left
        left -= 1
        try:
            if reply.flags & clp.FAILED:
                status = clp.status_name(reply.status)
                raise EnvFailed(f"{part.session.name} refused {clp.Op(op).name}: {status}, {reply.text}.")
            take(part, reply)
        except (EnvFailed, UserError) as error:
            wrong.append(error)
        except BadMessage as error:  # the fleet gives it up for that
            wrong.append(EnvFailed(f"{part.session.name} sent {error}."))
            raise

    with fleet.lock:
        for part, payload in parts:
            part.session.submit(
                op, part.count, payload, partial(done, part), deadline_s=timeout_s, flags=flags, meta=meta
            )
    while left:  # deadlines of requests end it: a session that does not keep them is lost
        for part, _ in parts:
            if part.session.lost is not None:
                raise EnvFailed(f"{clp.Op(op).name}: {part.session.lost}.")
        fleet.poll(_POLL_S)
    if wrong:
        raise wrong[0]


def _raise_failed(part: Part, row: int, statuses: Array, reply: Message) -> None:
    status, name = int(statuses[row]), part.session.name
    said = (reply.meta or {}).get("rows", {})
    words = said.get(str(row), "") if isinstance(said, dict) else ""
    if status == clp.Status.E_SNAPSHOT_FULL:
        raise UserError(
            f"{name} keeps as many states as it may ({words}): search with fewer simulations or trees, run more "
            "simulators, or let each keep more with env_kwargs snapshot_mb."
        )
    raise EnvFailed(f"{name}: {clp.status_name(status)} {words}".rstrip() + ".")
