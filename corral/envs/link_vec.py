"""External simulators as a VecEnv. Environments sit in simulators' slots; who loses its simulator gets another.

A step costs one message to each simulator and one answer. A simulator that is lost costs its environments an episode
each, which ends truncated and faulty (see `losses`); they go on in other simulators that have room, or wait.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from corral import seeding
from corral.envs.contract import VecEnv
from corral.envs.flight import Flight
from corral.envs.id_set import IdSet
from corral.envs.losses import Losses
from corral.envs.rows import FAULTY, FIRST, GAME_OVER, TERMINATED, TRUNCATED, Rows
from corral.envs.seating import Seating
from corral.envs.supervise import Fault, FaultLog, Supervision
from corral.errors import EnvFailed, UserError
from corral.link import protocol as clp
from corral.link.fleet import Fleet, Member
from corral.link.message import BadMessage, Message
from corral.link.session import Session
from corral.types import Array, StepBatch, Tree

log = logging.getLogger("corral.link")

_POLL_S = 0.25
_SAY_S = 5.0  # what waits for longer is worth a word
_SLOW_ROW_S = 500e-6  # slower steps are asked for one by one, so that `recv(min_ready)` gets them early


class LinkVecEnv(VecEnv):
    """VecEnv over the simulators of a fleet."""

    pipelined = True

    def __init__(
        self,
        fleet: Fleet,
        num_envs: int,
        supervision: Supervision,
        role: str,
        *,
        simulators: int,
        elastic: bool,
        release: Callable[[], Any],
    ):
        """Wait for so many simulators, and take places in them; `elastic` says that more may come later."""
        self.num_envs, self._role, self._seed = num_envs, role, 0
        self._fleet, self._supervision, self._elastic = fleet, supervision, elastic
        self._faults = FaultLog(supervision)
        self._member = Member(lambda s: me().joined(s), lambda s, kind, words: me().lost(s, kind, words))
        me: Any = weakref.ref(self)
        self._stop = weakref.finalize(self, _leave, fleet, self._member, release)
        self._homeless_since: float | None = None
        self._said_homeless = False
        try:
            self._gather(simulators)
            assert fleet.spec is not None
            self.spec = fleet.spec
            self._rows = Rows(self.spec, num_envs)
            self._flight = Flight(num_envs, self.spec)
            self._losses = Losses(self._rows, self._flight)
            self._to_play = np.zeros(num_envs, np.int8)
            self._moving: dict[int, None] = {}
            self._seating = Seating(num_envs)
            self._require_room()
            self._seating.fill(list(fleet.sessions.values()))
            fleet.members.append(self._member)
        except BaseException:
            self._stop()
            raise

    # -- the contract --------------------------------------------------------------------------------------

    @property
    def faults(self) -> Iterable[Fault]:
        """The most recent failures of environments."""
        return tuple(self._faults.recent)

    @property
    def restarts(self) -> int:
        """How many times an environment was restarted."""
        return self._faults.restarts

    @property
    def urls(self) -> list[str]:
        """Where simulators dial in, or where they were dialled."""
        return self._fleet.binding.urls

    def reset(self, seed: int = 0) -> None:
        """Start new seeded episodes everywhere, after the steps still under way are done."""
        flight = self._flight
        flight.require_open()
        while self._busy():
            self._pump()
        self._seed = seed
        flight.start()
        self._losses.clear()
        self._moving.clear()
        self._rows.flip(flight.everyone)
        self._rows.episode[:] = 0
        seated = self._seating.seated(flight.everyone.ids)
        homeless = flight.everyone.ids[~seated]
        if len(homeless):
            self._losses.owe_reset(homeless)
        self._reset(flight.everyone.ids[seated])

    def send(self, env_ids: Array, actions: Tree) -> None:
        """Hand one action to each of these idle environments."""
        flight, rows = self._flight, self._rows
        chosen, leaves = flight.take_off(env_ids, actions)
        try:
            with self._fleet.lock:
                for row, leaf in zip(rows.action, leaves, strict=True):
                    row[chosen.index] = leaf
                if self._losses.owing:
                    alive = self._losses.settle(chosen.ids)
                    if not len(alive):
                        return
                    chosen = flight.sets.of(alive)
                rows.flip(chosen)
                self._step(chosen)
        except BaseException:  # Ctrl-C in the middle would leave rows that nobody works on
            self.close()
            raise

    def recv(self, min_ready: int | None = None, *, env_ids: Array | None = None) -> StepBatch:
        """Wait for results; environments whose simulator fails meanwhile get another."""
        flight = self._flight
        if not flight.started:
            self.reset(self.seed)
        wanted, count = flight.wanted(min_ready, env_ids)
        while flight.num_ready(wanted) < count:
            self._pump()
        with self._fleet.lock:
            batch = self._rows.collect(flight.land(wanted))
            if self._losses.owing:
                self._start_due()
        return batch

    def linger(self, enough: int, most_s: float) -> None:
        """Take in results until `enough` are there."""
        flight, until = self._flight, time.monotonic() + most_s
        while flight.num_ready(None) < enough and (left := until - time.monotonic()) > 0:
            self._pump(left)

    def close(self) -> None:
        """Leave the simulators; who was dialled or launched for this alone is let go."""
        if hasattr(self, "_flight"):
            self._flight.closed = True
        self._stop()

    # -- requests ------------------------------------------------------------------------------------------

    def _step(self, chosen: IdSet) -> None:
        for session, ids in self._seating.groups(chosen):
            simulator, slots = session.simulator, self._seating.slots(ids)
            most = 1 if session.row_s > _SLOW_ROW_S else session.most_rows
            for start in range(0, len(ids), most):
                some = ids[start : start + most]
                actions = simulator.action.write([leaf[some] for leaf in self._rows.action], len(some))
                session.submit(
                    clp.Op.STEP, len(some), [slots[start : start + most].tobytes(), actions],
                    lambda reply, s=session, i=some: self._stepped(s, i, reply),
                    deadline_s=self._supervision.step_timeout_s, flags=clp.AUTORESET,
                )  # fmt: skip

    def _reset(self, env_ids: Array) -> None:
        """Start episodes with seeds of their own in the simulators where these environments sit."""
        rows = self._rows
        for env_id in env_ids.tolist():
            rows.seed[env_id] = seeding.env_seed(self._seed, self._role, env_id, int(rows.episode[env_id]))
        rows.step[env_ids] = 0
        for session, ids in self._seating.groups_of(env_ids):
            slots, seeds = self._seating.slots(ids), rows.seed[ids].astype("<u8")
            for start in range(0, len(ids), session.most_rows):
                part = slice(start, start + session.most_rows)
                session.submit(
                    clp.Op.RESET, len(ids[part]), [slots[part].tobytes(), seeds[part].tobytes()],
                    lambda reply, s=session, i=ids[part]: self._was_reset(s, i, reply),
                    deadline_s=self._supervision.start_timeout_s,
                )  # fmt: skip

    # -- answers -------------------------------------------------------------------------------------------

    def _stepped(self, session: Session, ids: Array, reply: Message) -> None:
        simulator, rows = session.simulator, self._rows
        table, obs, final = self._read(session, ids, reply)
        flags, status = table[-2 - (simulator.hello.players > 1)], table[-1 - (simulator.hello.players > 1)]
        self._write(ids, table, obs, simulator.hello.players)
        rows.step[ids] += 1
        if not np.count_nonzero(flags):
            rows.flags[ids] = False
            self._arrive(ids)
            return
        self._write_flags(ids, flags)
        self._write_finals(ids, flags, final, obs)
        faulty = ids[(flags & clp.FAULTY) != 0]
        started = ids[(flags & (clp.FIRST | clp.FAULTY)) == clp.FIRST]
        rows.episode[started], rows.step[started] = rows.episode[started] + 1, 0
        good = ids
        if len(faulty):
            good = self._take_faults(session, ids, flags, status, reply)
        movers = [i for i in started.tolist() if i in self._moving]
        if movers:
            good = good[~np.isin(good, movers)]
            self._move(movers)
        self._arrive(good)

    def _take_faults(self, session: Session, ids: Array, flags: Array, status: Array, reply: Message) -> Array:
        """Report environments that failed within a simulator; returns whose results are complete."""
        words = (reply.meta or {}).get("rows", {})
        waits = []
        for row in np.flatnonzero(flags & clp.FAULTY).tolist():
            env_id = int(ids[row])
            text = words.get(str(row), "") if isinstance(words, dict) else ""
            kind = "nan" if status[row] == clp.Status.E_NOT_FINITE else "raised"
            detail = f"in {session.name}: {clp.status_name(int(status[row]))} {text}"
            self._report(env_id, kind, detail)
            if flags[row] & clp.FIRST:  # it has started again by itself
                self._rows.episode[env_id] += 1
                self._rows.step[env_id] = 0
                self._rows.mark_lost(env_id)
            else:
                waits.append(env_id)
        if waits:
            self._losses.note(np.array(waits))
            self._start_due()
        return ids[~np.isin(ids, waits)]

    def _was_reset(self, session: Session, ids: Array, reply: Message) -> None:
        table, obs, _ = self._read(session, ids, reply)
        players = session.simulator.hello.players
        flags = table[-2 - (players > 1)]
        failed = ids[(flags & clp.FAULTY) != 0]
        self._write(ids, table, obs, players)
        self._rows.reward[ids] = self._rows.raw_reward[ids] = 0.0
        self._rows.flags[ids] = False
        self._rows.flags[ids, FIRST] = True
        if len(failed):
            self._failed_resets(session, ids, failed, reply)
        self._arrive(ids[(flags & clp.FAULTY) == 0], started=True)

    def _failed_resets(self, session: Session, ids: Array, failed: Array, reply: Message) -> None:
        words = (reply.meta or {}).get("rows", {})
        for row in np.flatnonzero(np.isin(ids, failed)).tolist():
            text = words.get(str(row), "") if isinstance(words, dict) else ""
            self._report(int(ids[row]), "raised", f"in reset, in {session.name}: {text}")
        self._rows.episode[failed] += 1
        self._losses.owe_reset(failed)
        self._start_due()

    def _read(self, session: Session, ids: Array, reply: Message) -> tuple[list[Array], list[Array], list[Array] | None]:
        """Leaves of rows, observations, and last observations; BadMessage when they do not fit."""
        if reply.flags & clp.FAILED:
            raise BadMessage(f"{clp.status_name(reply.status)} in answer to a good request: {reply.text}")
        simulator, batch = session.simulator, len(ids)
        if reply.batch != batch or not 2 <= len(reply.payload) <= 3:
            raise BadMessage(f"{reply.batch} rows in {len(reply.payload)} frames in answer to {batch} rows")
        table = simulator.rows.read(reply.payload[0], batch)
        obs = simulator.observation.read(reply.payload[1], batch)
        flags = table[-2 - (simulator.hello.players > 1)]
        ended = np.count_nonzero((flags & (clp.FIRST | clp.FAULTY)) == clp.FIRST)
        if reply.op == clp.Op.RESET:
            return table, obs, None
        if bool(ended) != (len(reply.payload) == 3):
            raise BadMessage(f"{ended} ended episodes and {len(reply.payload)} frames")
        over = (flags & (clp.TERMINATED | clp.TRUNCATED)) != 0
        if np.any(over & ((flags & (clp.FIRST | clp.FAULTY)) == 0)) or np.any(~over & ((flags & clp.FIRST) != 0)):
            raise BadMessage("episodes that ended without another, or the other way round")
        final = simulator.observation.read(reply.payload[2], ended) if ended else None
        return table, obs, final

    def _write(self, ids: Array, table: list[Array], obs: list[Array], players: int) -> None:
        rows = self._rows
        for leaf, value in zip(rows.obs, obs, strict=True):
            leaf[rows.phase[ids], ids] = value
        reward = table[0]
        who: Any = 0
        if players > 1:  # of whoever moved
            who = np.clip(self._to_play[ids], 0, players - 1)
            self._to_play[ids] = table[-1]
        index = np.arange(len(ids))
        rows.reward[ids] = reward[index, who]
        raw = table[1] if len(table) == 4 + (players > 1) else reward
        rows.raw_reward[ids] = raw[index, who]

    def _write_flags(self, ids: Array, flags: Array) -> None:
        rows = self._rows
        over = (flags & (clp.TERMINATED | clp.TRUNCATED)) != 0
        for place, value in (
            (TERMINATED, (flags & clp.TERMINATED) != 0),
            (TRUNCATED, (flags & clp.TRUNCATED) != 0),
            (FAULTY, (flags & clp.FAULTY) != 0),
            (FIRST, (flags & clp.FIRST) != 0),
            (GAME_OVER, over & ((flags & clp.LIFE) == 0)),
        ):
            rows.flags[ids, place] = value

    def _write_finals(self, ids: Array, flags: Array, final: list[Array] | None, obs: list[Array]) -> None:
        if final is not None:
            ended = ids[(flags & (clp.FIRST | clp.FAULTY)) == clp.FIRST]
            for leaf, value in zip(self._rows.final, final, strict=True):
                leaf[ended] = value

    def _arrive(self, ids: Array, *, started: bool = False) -> None:
        if not len(ids):
            return
        done: IdSet | None = self._flight.sets.of(ids)
        if self._losses.owing:
            done = self._losses.without(done)
        if done is not None:
            self._flight.arrive(done.mask)
            self._losses.fresh &= ~done.mask

    # -- simulators that come and go -----------------------------------------------------------------------

    def joined(self, session: Session) -> None:
        """A simulator has come: it takes who has none, and later some of the others' environments."""
        self._seating.fill(list(self._fleet.sessions.values()))
        self._start_due()
        self._rebalance()

    def lost(self, session: Session, kind: str, words: str) -> None:
        """A simulator is gone: its environments end their episodes and look for another."""
        ids = self._seating.leave(session)
        if not len(ids):
            return
        if self._flight.started:
            flying = self._flight.flying(ids)
            culprit = int(ids[flying][0]) if flying.any() else int(ids[0])
            self._report(culprit, kind, words)
            for env_id in ids.tolist():
                if env_id != culprit:
                    self._report(env_id, "neighbour", f"environment {culprit}")
            for env_id in ids.tolist():
                self._moving.pop(env_id, None)
            self._losses.note(ids)
        self._seating.fill(list(self._fleet.sessions.values()))
        self._start_due()

    def _start_due(self) -> None:
        """Let environments that lost theirs, and sit somewhere, start their next episodes."""
        if not self._flight.started:
            return
        ids = self._flight.everyone.ids
        due = self._losses.take_resets(ids[self._seating.seated(ids)])
        if len(due):
            self._reset(due)

    def _rebalance(self) -> None:
        """Choose who moves to another simulator when its episode ends."""
        for env_id in self._seating.surplus(list(self._fleet.sessions.values())):
            self._moving[env_id] = None

    def _move(self, env_ids: list[int]) -> None:
        """Their episodes have ended: start the next ones elsewhere. The row is complete but for its observation."""
        for env_id in env_ids:
            del self._moving[env_id]
        ids = np.array(env_ids)
        self._seating.reseat(ids, list(self._fleet.sessions.values()))
        rows = self._rows
        kept = rows.table[ids].copy()
        for env_id in env_ids:
            rows.seed[env_id] = seeding.env_seed(self._seed, self._role, env_id, int(rows.episode[env_id]))
        for session, some in self._seating.groups_of(ids):
            table = kept[np.isin(ids, some)]

            def done(reply: Message, session: Session = session, some: Array = some, table: Array = table) -> None:
                self._was_reset(session, some, reply)
                good = ~np.isin(some, self._losses.unknown())
                rows.table[some[good]] = table[good]

            seeds = rows.seed[some].astype("<u8")
            session.submit(
                clp.Op.RESET, len(some), [self._seating.slots(some).tobytes(), seeds.tobytes()], done,
                deadline_s=self._supervision.start_timeout_s,
            )  # fmt: skip

    def _report(self, env_id: int, kind: str, detail: str) -> None:
        rows = self._rows
        stepping = self._flight.in_flight >> env_id & 1
        state = int(rows.seed[env_id]), int(rows.episode[env_id]), int(rows.step[env_id]) + stepping
        self._faults.record(Fault(env_id, kind, *state, detail))

    # -- waiting -------------------------------------------------------------------------------------------

    def _pump(self, most_s: float = _POLL_S) -> None:
        try:
            self._fleet.poll(min(most_s, _POLL_S))
            if self._seating.homeless:
                self._check_homeless()
            else:
                self._homeless_since = None
        except BaseException:
            self.close()
            raise

    def _busy(self) -> bool:
        return any(session.waiting for session in self._fleet.sessions.values())

    def _gather(self, wanted: int) -> None:
        """Wait for the simulators to begin with; EnvFailed when they do not come."""
        fleet, start, said = self._fleet, time.monotonic(), False
        while len(fleet.sessions) < wanted:
            waited, limit = time.monotonic() - start, self._supervision.start_timeout_s
            if waited > limit:
                raise EnvFailed(
                    f"{len(fleet.sessions)} of {wanted} simulators at {', '.join(fleet.binding.urls)} after "
                    f"{waited:.0f} s; start them, or raise Supervision.start_timeout_s."
                )
            if waited > _SAY_S and not said:
                said = True
                log.warning(
                    "waiting for %d more simulators at %s, for up to %.0f s.",
                    wanted - len(fleet.sessions), ", ".join(fleet.binding.urls), limit,
                )  # fmt: skip
            fleet.poll(_POLL_S)

    def _require_room(self) -> None:
        room = sum(session.simulator.hello.slots for session in self._fleet.sessions.values())
        if room < self.num_envs and not self._elastic:
            raise UserError(
                f"{', '.join(self.urls)} runs at most {room} environments, and {self.num_envs} are wanted: start it with "
                f"--envs {self.num_envs}, or set num_envs={room}."
            )

    def _check_homeless(self) -> None:
        """Say that environments wait for a simulator; EnvFailed when none comes."""
        now, count = time.monotonic(), self._seating.homeless
        if self._homeless_since is None:
            self._homeless_since, self._said_homeless = now, False
        waited, limit = now - self._homeless_since, self._supervision.start_timeout_s
        words = f"{count} of {self.num_envs} environments have no simulator at {', '.join(self.urls)}"
        if waited > limit:
            raise EnvFailed(f"{words}, for {waited:.0f} s now; start one, or raise Supervision.start_timeout_s.")
        if waited > _SAY_S and not self._said_homeless:
            self._said_homeless = True
            log.warning("%s; waiting for one, for up to %.0f s.", words, limit - waited)


def _leave(fleet: Fleet, member: Member, release: Callable[[], Any]) -> None:
    if member in fleet.members:
        fleet.members.remove(member)
    release()
