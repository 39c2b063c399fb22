"""External simulators as a VecEnv. Environments sit in simulators' slots; who loses its simulator gets another.

A step costs one message to each simulator and one answer. A simulator that is lost costs its environments an episode
each, which ends truncated and faulty (see `losses`); they go on in other simulators that have room, or wait.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np

from corral.core import seeding
from corral.core.encoding import Buffer
from corral.core.errors import UserError
from corral.core.types import Array, StepBatch, Tree
from corral.envs.backends.simulators.replies import ReplyRows, StepReply, read_answer
from corral.envs.backends.simulators.slots import Slot, SlotTable, SlotTimeouts
from corral.envs.backends.simulators.states import LinkStates
from corral.envs.stepping.id_set import IdSet
from corral.envs.stepping.in_flight import InFlight
from corral.envs.stepping.pending_faults import PendingFaults
from corral.envs.stepping.rows import FIRST, EnvRows
from corral.envs.supervision import Fault, FaultLog, Supervision
from corral.envs.vec_env import VecEnv
from corral.link import protocol as clp
from corral.link.client.fleet import Fleet, FleetMember
from corral.link.client.session import SimulatorSession
from corral.link.message import Message

_POLL_S = 0.25
_STEP = int(clp.Op.STEP)
_BALANCE_S = 5.0  # between looks at who is slow
_WORTH_S = 1e-3  # steps of everybody that are quicker than this are not worth moving anybody for
_SLOW_ROW_S = 500e-6  # slower steps are asked for one by one, so that `recv(min_ready)` gets them early


Take = Callable[[SimulatorSession, IdSet, StepReply], None]


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
        fewer: bool = False,
    ):
        """Wait for so many simulators, and take slots in them; `elastic` says that more may come later.

        `fewer`: have as many environments as there are free slots, one at least and `num_envs` at most.
        """
        self._role, self._seed = role, 0
        self._fleet, self._supervision, self._elastic = fleet, supervision, elastic
        self._faults = FaultLog(supervision)
        self._member = FleetMember(lambda s: me().joined(s), lambda s, kind, words: me().lost(s, kind, words))
        me: Any = weakref.ref(self)
        self._stop = weakref.finalize(self, _leave, fleet, self._member, release)
        self._patience = SlotTimeouts(fleet, supervision.start_timeout_s)
        try:
            self._patience.gather(simulators)
            assert fleet.spec is not None
            self.spec = fleet.spec
            self.num_envs = num_envs = min(num_envs, self._patience.wait_for_slot()) if fewer else num_envs
            self._seating, self._under_way = SlotTable(num_envs), 0  # mask of environments in requests
            self._rows = EnvRows(self.spec, num_envs)
            self._in_flight = InFlight(num_envs, self.spec)
            self._pending = PendingFaults(self._rows, self._in_flight)
            self._to_play = np.zeros(num_envs, np.int8)
            self._moving: dict[int, None] = {}
            self._ended: dict[int, Array] = {}  # rows of episodes whose successors have yet to start elsewhere
            self._balance_at = time.monotonic() + _BALANCE_S
            self._late: list[ReplyRows] = []
            self._require_room()
            with fleet.lock:
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

    def seats(self, env_ids: Array) -> Slot:
        """Where idle environments sit, for who plans from their states; those that are lost sit anywhere."""
        in_flight, rows, chosen = self._in_flight, self._rows, self._in_flight.sets.of(env_ids)
        in_flight.require_open()
        if not in_flight.started or (in_flight.in_flight | in_flight.ready) & chosen.mask:
            raise UserError("Only the states of idle environments are known: recv() their results first.")
        with self._fleet.lock:
            lost = ~self._seating.seated(chosen.ids)
            if self._pending.owing:  # some have a new seat already, in which nothing has begun
                lost |= np.isin(chosen.ids, self._pending.unknown())
            where = self._seating.find(chosen.ids[~lost])
            which, slots = np.zeros(len(lost), np.int64), np.zeros(len(lost), np.uint32)
            which[~lost], slots[~lost] = where[1:]
            obs = [leaf.copy() for leaf in rows.current(chosen, rows.half(chosen))]
            return Slot(where[0], which, slots, obs, self._to_play[chosen.ids], lost)

    def states(self, memory_mb: float = 1024.0) -> LinkStates:
        """States inside the simulators; UserError where a simulator keeps none."""
        return LinkStates(self, memory_mb)

    def note_moved(self, env_ids: Array, obs: list[Array], to_play: Array) -> None:
        """Somebody has put these idle environments into other states."""
        rows = self._rows
        for leaf, value in zip(rows.obs, obs, strict=True):
            leaf[rows.phase[env_ids], env_ids] = value
        self._to_play[env_ids] = to_play

    def reset(self, seed: int = 0) -> None:
        """Start new seeded episodes everywhere, after the steps still under way are done."""
        in_flight = self._in_flight
        in_flight.require_open()
        while self._under_way:
            self._pump()
        with self._fleet.lock:
            self._seed = seed
            in_flight.start()
            self._pending.clear()
            self._moving.clear()
            self._ended.clear()
            self._rows.flip(in_flight.everyone)
            self._rows.episode[:] = 0
            seated = self._seating.seated(in_flight.everyone.ids)
            homeless = in_flight.everyone.ids[~seated]
            if len(homeless):
                self._pending.owe_reset(homeless)
            self._reset(in_flight.everyone.ids[seated])

    def send(self, env_ids: Array, actions: Tree) -> None:
        """Hand one action to each of these idle environments."""
        in_flight, rows = self._in_flight, self._rows
        chosen, leaves = in_flight.send(env_ids, actions)
        try:
            with self._fleet.lock:
                if self._pending.owing:
                    self._write_actions(chosen, leaves)
                    alive = self._pending.deliver(chosen.ids)
                    if not len(alive):
                        return
                    chosen = in_flight.sets.of(alive)
                    leaves = [leaf[chosen.index] for leaf in rows.action]
                rows.flip(chosen)
                self._step(chosen, leaves)
        except BaseException:  # Ctrl-C in the middle would leave rows that nobody works on
            self.close()
            raise

    def recv(self, min_ready: int | None = None, *, env_ids: Array | None = None) -> StepBatch:
        """Wait for results; environments whose simulator fails meanwhile get another."""
        in_flight = self._in_flight
        if not in_flight.started:
            self.reset(self.seed)
        wanted, count = in_flight.wanted(min_ready, env_ids)
        while in_flight.num_ready(wanted) < count:
            self._pump()
        with self._fleet.lock:
            batch = self._rows.collect(in_flight.take(wanted))
            if self._pending.owing:
                self._start_due()
        return batch

    def linger(self, enough: int, most_s: float) -> None:
        """Take in results until `enough` are there."""
        in_flight, until = self._in_flight, time.monotonic() + most_s
        while in_flight.num_ready(None) < enough and (left := until - time.monotonic()) > 0:
            self._pump(left)

    def close(self) -> None:
        """Leave the simulators; who was dialled or launched for this alone is let go."""
        if hasattr(self, "_in_flight"):
            with self._fleet.lock:
                self._in_flight.closed = True
                self._give_back_seats()
        self._stop()

    def _give_back_seats(self) -> None:
        """All but those in requests under way, which come back when these are answered."""
        self._seating.leave_all(but=self._in_flight.sets.bools(self._under_way))

    # -- requests ------------------------------------------------------------------------------------------

    def _step(self, chosen: IdSet, leaves: list[Array]) -> None:
        """Let these environments step with these actions."""
        rows, sets, deadline_s = self._rows, self._in_flight.sets, self._supervision.step_timeout_s
        shares = self._seating.shares(chosen, sets)
        first = shares[0]
        if len(shares) == 1 and len(chosen.numbers) <= _most_rows(first.session):
            actions = first.session.simulator.action.write(leaves, len(chosen.numbers))
            self._ask(first.session, _STEP, chosen, [first.slots, actions], self._stepped, deadline_s, clp.AUTORESET)
            return
        self._write_actions(chosen, leaves)
        for share in shares:
            session = share.session
            for part in share.parts(_most_rows(session), sets):
                chosen = part.chosen
                actions = session.simulator.action.write([leaf[chosen.index] for leaf in rows.action], len(chosen))
                self._ask(session, _STEP, chosen, [part.slots, actions], self._stepped, deadline_s, clp.AUTORESET)

    def _write_actions(self, chosen: IdSet, leaves: list[Array]) -> None:
        for row, leaf in zip(self._rows.action, leaves, strict=True):
            row[chosen.index] = leaf

    def _reset(self, env_ids: Array) -> None:
        """Start episodes with seeds of their own in the simulators where these environments sit."""
        rows, sets = self._rows, self._in_flight.sets
        self._count_steps()
        for env_id in env_ids.tolist():
            rows.seed[env_id] = seeding.env_seed(self._seed, self._role, env_id, int(rows.episode[env_id]))
        rows.step[env_ids] = 0
        for share in self._seating.shares(sets.of(env_ids), sets) if len(env_ids) else ():
            for part in share.parts(share.session.most_rows, sets):
                seeds = rows.seed[part.chosen.ids].astype("<u8").tobytes()
                self._ask(
                    share.session, clp.Op.RESET, part.chosen, [part.slots, seeds], self._was_reset,
                    self._supervision.start_timeout_s,
                )  # fmt: skip

    def _ask(
        self,
        session: SimulatorSession,
        op: int,
        chosen: IdSet,
        payload: list[Buffer],
        take: Take,
        deadline_s: float,
        flags: int = 0,
    ) -> None:
        self._under_way |= chosen.mask
        done = partial(self._answered, session, chosen, take)
        session.submit(op, len(chosen.numbers), payload, done, deadline_s=deadline_s, flags=flags)

    # -- answers -------------------------------------------------------------------------------------------

    def _answered(self, session: SimulatorSession, chosen: IdSet, take: Take, reply: Message) -> None:
        if self._in_flight.closed:
            self._under_way &= ~chosen.mask
            self._give_back_seats()
            return
        if reply.op == _STEP and self._stepped_well(session, chosen, reply):
            return
        answer = read_answer(session.simulator, len(chosen), reply)
        self._under_way &= ~chosen.mask
        take(session, chosen, answer)

    def _stepped_well(self, session: SimulatorSession, chosen: IdSet, reply: Message) -> bool:
        """Take in a STEP that ended no episode, as most do, in as few operations as possible; False for another."""
        if chosen.route is None:  # all simulators have the same layout
            index, one = chosen.index, session.simulator.hello.players == 1
            follow = one and isinstance(index, slice) and index.step in (None, 1)
            chosen.route = ReplyRows(self._rows, chosen, session.simulator) if follow else False
        place, half = chosen.route, self._rows.half(chosen)
        if not place or half is None or reply.flags != clp.REPLY or reply.batch != len(chosen.numbers):
            return False
        if not place.take(half, reply.payload):
            return False
        if not place.late:
            self._late.append(place)
        place.late += 1
        self._under_way &= ~chosen.mask
        self._arrive(chosen)
        return True

    def _count_steps(self) -> None:
        """Add up the steps that places have put off, before somebody looks at them or sets them back."""
        for place in self._late:
            place.step += place.late
            place.late = 0
        self._late.clear()

    def _stepped(self, session: SimulatorSession, chosen: IdSet, answer: StepReply) -> None:
        rows, ids, flags = self._rows, chosen.ids, answer.flags
        answer.write(rows, chosen, self._to_play)
        self._count_steps()
        rows.step[chosen.index] += 1
        rows.no_flags(chosen.index)
        if not np.count_nonzero(flags):
            self._arrive(chosen)
            return
        started = ids[answer.ended]
        answer.write_flags(rows, ids)
        if answer.final is not None:
            for leaf, value in zip(rows.final, answer.final, strict=True):
                leaf[started] = value
        rows.episode[started] += 1
        rows.step[started] = 0
        session.episodes += len(started)
        absent = self._take_faults(session, ids, answer) if np.count_nonzero(answer.status) else []
        if len(started):
            self._balance()
        movers = self._move([e for e in started.tolist() if e in self._moving]) if self._moving else []
        if absent or movers:
            ids = ids[~np.isin(ids, absent + movers)]
        if len(ids):
            self._arrive(self._in_flight.sets.of(ids))

    def _take_faults(self, session: SimulatorSession, ids: Array, answer: StepReply) -> list[int]:
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
            self._pending.note(np.array(waits))
            self._start_due()
        return waits

    def _was_reset(self, session: SimulatorSession, chosen: IdSet, answer: StepReply) -> None:
        rows, ids = self._rows, chosen.ids
        answer.write(rows, chosen, self._to_play)
        rows.reward[ids] = rows.raw_reward[ids] = 0.0
        rows.no_flags(ids)
        rows.flags[ids, FIRST] = True
        failed = ids[(answer.flags & clp.FAULTY) != 0]
        if len(failed):
            for row in np.flatnonzero(answer.flags & clp.FAULTY).tolist():
                self._report(int(ids[row]), "raised", f"in reset, in {session.name}: {answer.words(row)}", in_step=0)
            rows.episode[failed] += 1
            self._pending.owe_reset(failed)
            self._start_due()
            ids = ids[(answer.flags & clp.FAULTY) == 0]
        for env_id in self._ended.keys() & set(ids.tolist()):
            rows.table[env_id] = self._ended.pop(env_id)
        if len(ids):
            self._arrive(self._in_flight.sets.of(ids))

    def _arrive(self, results: IdSet) -> None:
        done: IdSet | None = results
        if self._pending.owing:
            done = self._pending.without(results)
        if done is not None:
            self._in_flight.complete(done.mask)
            self._pending.fresh &= ~done.mask

    # -- simulators that come and go -----------------------------------------------------------------------

    def joined(self, session: SimulatorSession) -> None:
        """A simulator has come: it takes who has none, and later some of the others' environments."""
        self._seating.fill(list(self._fleet.sessions.values()))
        self._start_due()
        self._rebalance()

    def lost(self, session: SimulatorSession, kind: str, words: str) -> None:
        """A simulator is gone: its environments end their episodes and look for another."""
        ids = self._seating.leave(session)
        if not len(ids):
            return
        self._under_way &= ~self._in_flight.sets.of(ids).mask
        if self._in_flight.started:
            flying = self._in_flight.flying(ids)
            culprit = int(ids[flying][0]) if flying.any() else int(ids[0])
            self._report(culprit, kind, words)
            for env_id in ids.tolist():
                if env_id != culprit:
                    self._report(env_id, "neighbour", f"environment {culprit}")
            for env_id in ids.tolist():
                self._moving.pop(env_id, None)
            between = np.isin(ids, list(self._ended))  # two episodes: the row of the last one is complete
            self._pending.owe_reset(ids[between])
            self._pending.note(ids[~between])
        self._seating.fill(list(self._fleet.sessions.values()))
        self._start_due()

    def _start_due(self) -> None:
        """Let environments that lost theirs, and sit somewhere, start their next episodes."""
        if not self._in_flight.started:
            return
        self._count_steps()
        ids = self._in_flight.everyone.ids
        due = self._pending.take_resets(ids[self._seating.seated(ids)])
        if len(due):
            self._reset(due)

    def _rebalance(self) -> None:
        """Choose who moves to another simulator when its episode ends."""
        self._moving = dict.fromkeys(self._seating.surplus(list(self._fleet.sessions.values())))

    def _balance(self) -> None:
        """From time to time, see whether simulators have turned out slower or faster than their share of the load."""
        now = time.monotonic()
        if now > self._balance_at:
            self._balance_at = now + _BALANCE_S
            if self._seating.longest_s() > _WORTH_S:
                self._rebalance()

    def _move(self, env_ids: list[int]) -> list[int]:
        """Their episodes have ended: start the next ones elsewhere. Returns who moves; the others have to stay yet."""
        movers = self._seating.reseat(env_ids, list(self._fleet.sessions.values()))
        for env_id in movers:
            del self._moving[env_id]
            self._ended[env_id] = self._rows.table[env_id].copy()
        self._reset(np.array(movers, np.int64))
        return movers

    def _report(self, env_id: int, kind: str, detail: str, in_step: int | None = None) -> None:
        rows = self._rows
        self._count_steps()
        stepping = self._in_flight.in_flight >> env_id & 1 if in_step is None else in_step
        state = int(rows.seed[env_id]), int(rows.episode[env_id]), int(rows.step[env_id]) + stepping
        self._faults.record(Fault(env_id, kind, *state, detail))

    # -- waiting -------------------------------------------------------------------------------------------

    def _pump(self, most_s: float = _POLL_S) -> None:
        try:
            self._fleet.poll(min(most_s, _POLL_S))
            if self._seating.homeless:  # who shares the simulators may have made room
                with self._fleet.lock:
                    self._seating.fill(list(self._fleet.sessions.values()))
                    self._start_due()
            self._patience.check(self._seating.homeless)
        except BaseException:
            self.close()
            raise

    def _require_room(self) -> None:
        room = sum(session.simulator.hello.slots for session in self._fleet.sessions.values())
        if room < self.num_envs and not self._elastic:
            raise UserError(
                f"{', '.join(self.urls)} runs at most {room} environments, and {self.num_envs} are wanted: start it "
                f"with --envs {self.num_envs}, or set num_envs={room}."
            )


def _most_rows(session: SimulatorSession) -> int:
    """How many steps to ask for at once."""
    return 1 if session.row_s > _SLOW_ROW_S else session.most_rows


def _leave(fleet: Fleet, member: FleetMember, release: Callable[[], Any]) -> None:
    if member in fleet.members:
        fleet.members.remove(member)
    release()
