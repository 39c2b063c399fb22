"""External simulators as a VecEnv. Environments sit in simulators' slots; who loses its simulator gets another.

A step costs one message to each simulator and one answer. A simulator that is lost costs its environments an episode
each, which ends truncated and faulty (see `losses`); they go on in other simulators that have room, or wait.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from corral import seeding
from corral.encoding import Buffer
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
from corral.link.session import Session, Simulator
from corral.types import Array, StepBatch, Tree

log = logging.getLogger("corral.link")

_POLL_S = 0.25
_SAY_S = 5.0  # what waits for longer is worth a word
_SLOW_ROW_S = 500e-6  # slower steps are asked for one by one, so that `recv(min_ready)` gets them early


class _Answer:
    """A reply to RESET or STEP, as arrays that are views of it."""

    __slots__ = ("_meta", "ended", "final", "flags", "obs", "raw_reward", "reward", "status", "to_play")

    def __init__(self, simulator: Simulator, batch: int, payload: Sequence[Buffer], meta: dict[str, Any] | None):
        table = simulator.rows.read(payload[0], batch)
        self.obs = simulator.observation.read(payload[1], batch)
        self.to_play = table.pop() if simulator.hello.players > 1 else None
        self.status, self.flags = table.pop(), table.pop()
        self.reward, self.raw_reward = table[0], table[-1]
        self.final: list[Array] | None = None
        self.ended: Any = None
        self._meta = meta

    def read_final(self, simulator: Simulator, payload: Sequence[Buffer]) -> None:
        """Last observations of episodes that others have followed; BadMessage when flags and frames disagree."""
        flags = self.flags
        self.ended = (flags & (clp.FIRST | clp.FAULTY)) == clp.FIRST
        over = (flags & (clp.TERMINATED | clp.TRUNCATED)) != 0
        if np.any(over & ((flags & (clp.FIRST | clp.FAULTY)) == 0)) or np.any(~over & ((flags & clp.FIRST) != 0)):
            raise BadMessage("episodes that ended without another, or the other way round")
        if np.any(((flags & clp.FAULTY) != 0) & (self.status == 0)):
            raise BadMessage("faulty rows without a status")
        count = int(np.count_nonzero(self.ended))
        if bool(count) != (len(payload) == 3):
            raise BadMessage(f"{count} ended episodes and {len(payload)} frames")
        if count:
            self.final = simulator.observation.read(payload[2], count)

    def words(self, row: int) -> str:
        """What the simulator says about a row that went wrong."""
        rows = (self._meta or {}).get("rows", {})
        text = rows.get(str(row), "") if isinstance(rows, dict) else ""
        return text if isinstance(text, str) else ""


Take = Callable[[Session, IdSet, _Answer], None]


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
            self._under_way = 0  # mask of environments in requests
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
    def fleet(self) -> Fleet:
        """The simulators, which other VecEnvs may share."""
        return self._fleet

    @property
    def urls(self) -> list[str]:
        """Where simulators dial in, or where they were dialled."""
        return self._fleet.binding.urls

    def reset(self, seed: int = 0) -> None:
        """Start new seeded episodes everywhere, after the steps still under way are done."""
        flight = self._flight
        flight.require_open()
        while self._under_way:
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
        """Let these environments step with the actions in their rows."""
        rows = self._rows
        for share in self._seating.shares(chosen, self._flight.sets):
            session = share.session
            action = session.simulator.action
            for part in share.parts(1 if session.row_s > _SLOW_ROW_S else session.most_rows, self._flight.sets):
                actions = action.write([leaf[part.chosen.index] for leaf in rows.action], len(part.chosen))
                self._ask(
                    session, clp.Op.STEP, part.chosen, [part.slots, actions], self._stepped,
                    self._supervision.step_timeout_s, clp.AUTORESET,
                )  # fmt: skip

    def _reset(self, env_ids: Array, take: Take | None = None) -> None:
        """Start episodes with seeds of their own in the simulators where these environments sit."""
        rows, sets = self._rows, self._flight.sets
        for env_id in env_ids.tolist():
            rows.seed[env_id] = seeding.env_seed(self._seed, self._role, env_id, int(rows.episode[env_id]))
        rows.step[env_ids] = 0
        for share in self._seating.shares(sets.of(env_ids), sets) if len(env_ids) else ():
            for part in share.parts(share.session.most_rows, sets):
                seeds = rows.seed[part.chosen.ids].astype("<u8").tobytes()
                self._ask(
                    share.session, clp.Op.RESET, part.chosen, [part.slots, seeds], take or self._was_reset,
                    self._supervision.start_timeout_s,
                )  # fmt: skip

    def _ask(
        self,
        session: Session,
        op: int,
        chosen: IdSet,
        payload: list[Buffer],
        take: Take,
        deadline_s: float,
        flags: int = 0,
    ) -> None:
        self._under_way |= chosen.mask
        done = partial(self._answered, session, chosen, take)
        session.submit(op, len(chosen), payload, done, deadline_s=deadline_s, flags=flags)

    # -- answers -------------------------------------------------------------------------------------------

    def _answered(self, session: Session, chosen: IdSet, take: Take, reply: Message) -> None:
        answer = self._read(session, len(chosen), reply)
        self._under_way &= ~chosen.mask
        take(session, chosen, answer)

    def _stepped(self, session: Session, chosen: IdSet, answer: _Answer) -> None:
        rows, ids, flags = self._rows, chosen.ids, answer.flags
        self._write(chosen, answer)
        rows.step[chosen.index] += 1
        rows.no_flags(chosen.index)
        if not np.count_nonzero(flags):
            self._arrive(chosen)
            return
        started = ids[answer.ended]
        self._write_flags(ids, flags)
        if answer.final is not None:
            for leaf, value in zip(rows.final, answer.final, strict=True):
                leaf[started] = value
        rows.episode[started] += 1
        rows.step[started] = 0
        session.episodes += len(started)
        absent = self._take_faults(session, ids, answer) if np.count_nonzero(answer.status) else []
        movers = [env_id for env_id in started.tolist() if env_id in self._moving] if self._moving else []
        if movers:
            self._move(movers)
        if absent or movers:
            ids = ids[~np.isin(ids, absent + movers)]
        if len(ids):
            self._arrive(self._flight.sets.of(ids))

    def _take_faults(self, session: Session, ids: Array, answer: _Answer) -> list[int]:
        """Report environments that failed within a simulator; returns those that have nothing to deliver yet."""
        waits = []
        for row in np.flatnonzero(answer.status).tolist():
            env_id, status = int(ids[row]), int(answer.status[row])
            kind = "nan" if status == clp.Status.E_NOT_FINITE else "raised"
            self._report(env_id, kind, f"in {session.name}: {clp.status_name(status)} {answer.words(row)}", in_step=0)
            if not answer.flags[row] & clp.FAULTY:  # between two episodes, which cost no row
                continue
            if answer.flags[row] & clp.FIRST:  # it has started again by itself
                self._rows.episode[env_id] += 1
                self._rows.step[env_id] = 0
                self._rows.mark_lost(env_id)
            else:
                waits.append(env_id)
        if waits:
            self._losses.note(np.array(waits))
            self._start_due()
        return waits

    def _was_reset(self, session: Session, chosen: IdSet, answer: _Answer) -> None:
        rows, ids = self._rows, chosen.ids
        self._write(chosen, answer)
        rows.reward[ids] = rows.raw_reward[ids] = 0.0
        rows.no_flags(ids)
        rows.flags[ids, FIRST] = True
        failed = ids[(answer.flags & clp.FAULTY) != 0]
        if len(failed):
            for row in np.flatnonzero(answer.flags & clp.FAULTY).tolist():
                self._report(int(ids[row]), "raised", f"in reset, in {session.name}: {answer.words(row)}", in_step=0)
            rows.episode[failed] += 1
            self._losses.owe_reset(failed)
            self._start_due()
            ids = ids[(answer.flags & clp.FAULTY) == 0]
        if len(ids):
            self._arrive(self._flight.sets.of(ids))

    def _read(self, session: Session, batch: int, reply: Message) -> _Answer:
        """What a reply to RESET or STEP says; BadMessage when it does not fit."""
        if reply.flags & clp.FAILED:
            raise BadMessage(f"{clp.status_name(reply.status)} in answer to a good request: {reply.text}")
        simulator, payload = session.simulator, reply.payload
        if reply.batch != batch or not 2 <= len(payload) <= 3:
            raise BadMessage(f"{reply.batch} rows in {len(payload)} frames in answer to {batch} rows")
        answer = _Answer(simulator, batch, payload, reply.meta)
        if reply.op == clp.Op.STEP and (len(payload) == 3 or np.count_nonzero(answer.flags)):
            answer.read_final(simulator, payload)
        return answer

    def _write(self, chosen: IdSet, answer: _Answer) -> None:
        rows, index = self._rows, chosen.index
        half = rows.half(chosen)
        for leaf, value in zip(rows.obs, answer.obs, strict=True):
            if half is None:
                leaf[rows.phase[chosen.ids], chosen.ids] = value
            else:
                leaf[half][index] = value
        if answer.to_play is None:
            rows.reward[index], rows.raw_reward[index] = answer.reward[:, 0], answer.raw_reward[:, 0]
        else:  # of whoever moved
            who = np.clip(self._to_play[chosen.ids], 0, answer.reward.shape[1] - 1)
            each = np.arange(len(chosen))
            rows.reward[index], rows.raw_reward[index] = answer.reward[each, who], answer.raw_reward[each, who]
            self._to_play[chosen.ids] = answer.to_play

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

    def _arrive(self, results: IdSet) -> None:
        done: IdSet | None = results
        if self._losses.owing:
            done = self._losses.without(results)
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
        self._under_way &= ~self._flight.sets.of(ids).mask
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
        ended = dict(zip(env_ids, self._rows.table[ids].copy(), strict=True))
        self._reset(ids, partial(self._moved, ended))

    def _moved(self, ended: dict[int, Array], session: Session, chosen: IdSet, answer: _Answer) -> None:
        """An episode has started elsewhere: deliver the end of the last one with its first observation."""
        self._was_reset(session, chosen, answer)
        for env_id in chosen.numbers:
            if self._flight.ready >> env_id & 1:
                self._rows.table[env_id] = ended[env_id]

    def _report(self, env_id: int, kind: str, detail: str, in_step: int | None = None) -> None:
        rows = self._rows
        stepping = self._flight.in_flight >> env_id & 1 if in_step is None else in_step
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
                f"{', '.join(self.urls)} runs at most {room} environments, and {self.num_envs} are wanted: start it "
                f"with --envs {self.num_envs}, or set num_envs={room}."
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
