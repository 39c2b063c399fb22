"""External simulators as a VecEnv. Each environment has a slot in a simulator, and gets another when that is lost.

A step costs one message to each simulator and one reply. A lost simulator costs its environments one episode each,
which ends truncated and faulty (see `pending_faults`); they continue in other simulators with free slots, or wait.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from corral.core import seeding
from corral.core.encoding import Buffer
from corral.core.errors import UserError
from corral.core.types import Array
from corral.envs.backends.row_vec_env import AsyncVecEnv
from corral.envs.backends.simulators.checkpoint import export_states, import_states
from corral.envs.backends.simulators.replies import QuickSteps, StepReply, read_answer
from corral.envs.backends.simulators.slots import EnvSlots, Rebalancer, SlotTable, SlotTimeouts
from corral.envs.stepping.id_set import IdSet
from corral.envs.stepping.in_flight import InFlight
from corral.envs.stepping.pending_faults import PendingFaults
from corral.envs.stepping.rows import FIRST, EnvRows
from corral.envs.supervision import FaultLog, Supervision
from corral.link import protocol as clp
from corral.link.client.fleet import Fleet, FleetMember
from corral.link.client.session import SimulatorSession
from corral.link.message import Message

if TYPE_CHECKING:
    from corral.envs.backends.simulators.states import LinkStates

_STEP = int(clp.Op.STEP)
_SLOW_ROW_S = 500e-6  # slower steps are requested one by one, so that `recv(min_ready)` gets them early

Take = Callable[[SimulatorSession, IdSet, StepReply], None]


class LinkVecEnv(AsyncVecEnv):
    """VecEnv over the simulators of a fleet."""

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
        """Wait for `simulators`, take slots; `elastic`: more may join; `fewer`: accept fewer slots than `num_envs`, if
        none is free those of another VecEnv, which gets them back when this one is closed.
        """
        self._role, self.fleet, self._lock, self._supervision = role, fleet, fleet.lock, supervision
        self._log = FaultLog(supervision)
        self._member = FleetMember(
            lambda s: me().joined(s), lambda s, kind, reason: me().lost(s, kind, reason),
            lambda most: me().lend(most), lambda: me()._slots.unplaced,
        )  # fmt: skip
        me: Any = weakref.ref(self)
        self._stop = weakref.finalize(self, _leave, fleet, self._member, release)
        self._timeouts = SlotTimeouts(fleet, supervision.start_timeout_s)
        try:
            self._timeouts.gather(simulators)
            assert fleet.spec is not None
            self.spec = fleet.spec
            self._slots, self._requested = SlotTable(num_envs), 0  # mask of environments in requests
            if fewer:
                self._take_free_slots(num_envs)
            self.num_envs = num_envs = self._slots.num_envs
            self._rebalancer = Rebalancer(self._slots)
            self._rows = EnvRows(self.spec, num_envs)
            self._in_flight = InFlight(num_envs, self.spec)
            self._pending = PendingFaults(self._rows, self._in_flight)
            self._to_play = np.zeros(num_envs, np.int8)
            self.continued: Array = np.zeros(num_envs, np.bool_)
            self._ended: dict[int, Array] = {}  # rows of ended episodes whose successors have yet to start elsewhere
            self._quick = QuickSteps(self._rows)
            if not elastic:
                self._timeouts.require_slots(num_envs)
            with fleet.lock:
                self._slots.fill(list(fleet.sessions.values()))
                fleet.members.append(self._member)
        except BaseException:
            self._stop()
            raise

    def _take_free_slots(self, most: int) -> None:
        while True:
            with self.fleet.lock:
                free = sum(session.room for session in self._sessions if session.has_room)
                for member in () if free else self.fleet.members:
                    free += member.lend(most - free)
                    self._member.borrows = free > 0
                if free:
                    self._slots = SlotTable(min(most, free))
                    return self._slots.fill(self._sessions)
            self._timeouts.wait_for_slot()

    @property
    def borrows(self) -> bool:
        """Whether its slots are lent, or another VecEnv waits for some."""
        return self._member.borrows or any(each.waiting() for each in self.fleet.members if each is not self._member)

    def lend(self, most: int) -> int:
        """Free the slots of idle environments, whose episodes end with a faulty row, until another VecEnv is closed."""
        in_flight, ids = self._in_flight, self._in_flight.all_envs.ids
        idle = ~in_flight.sets.bools(in_flight.in_flight | in_flight.ready) if in_flight.started else ids >= 0
        if in_flight.closed or self._pending.any_pending:
            return 0
        lent = ids[idle & self._slots.placed(ids)][:most]
        self._slots.leave_some(lent)
        if in_flight.started and len(lent):
            self._quick.count_steps()
            self._rebalancer.forget(lent.tolist())
            self._pending.schedule_faults(lent)
            self._timeouts.note_lent(len(lent))
        return len(lent)

    def slots_of(self, env_ids: Array) -> EnvSlots:
        """The slots of idle environments, for planning from their states; arbitrary for lost environments."""
        in_flight, rows, chosen = self._in_flight, self._rows, self._in_flight.sets.of(env_ids)
        in_flight.require_open()
        if not in_flight.started or (in_flight.in_flight | in_flight.ready) & chosen.mask:
            raise UserError("Only the states of idle environments are known: recv() their results first.")
        with self.fleet.lock:
            lost = ~self._slots.placed(chosen.ids)
            if self._pending.any_pending:  # some already have a new slot, in which no episode has begun
                lost |= np.isin(chosen.ids, self._pending.unknown())
            where = self._slots.find(chosen.ids[~lost])
            which, slots = np.zeros(len(lost), np.int64), np.zeros(len(lost), np.uint32)
            which[~lost], slots[~lost] = where[1:]
            obs = [leaf.copy() for leaf in rows.current(chosen, rows.half(chosen))]
            return EnvSlots(where[0], which, slots, obs, self._to_play[chosen.ids], lost)

    def states(self, memory_mb: float = 1024.0) -> LinkStates:
        """States inside the simulators; UserError where a simulator keeps none."""
        from corral.envs.backends.simulators.states import LinkStates  # compiles, which few need

        return LinkStates(self, memory_mb)

    def note_moved(self, env_ids: Array, obs: list[Array], to_play: Array) -> None:
        for leaf, value in zip(self._rows.obs, obs, strict=True):
            leaf[self._rows.phase[env_ids], env_ids] = value
        self._to_play[env_ids] = to_play

    def reset(self, seed: int = 0) -> None:
        in_flight = self._in_flight
        in_flight.require_open()
        while self._requested:
            self._pump()
        with self.fleet.lock:
            self._seed = seed
            in_flight.start()
            self._pending.clear()
            self._rebalancer.moving.clear()
            self._ended.clear()
            self._rows.flip(in_flight.all_envs)
            self._rows.episode[:] = 0
            placed = self._slots.placed(in_flight.all_envs.ids)
            unplaced = in_flight.all_envs.ids[~placed]
            if len(unplaced):
                self._pending.schedule_reset(unplaced)
            self._reset(in_flight.all_envs.ids[placed])

    def state_dict(self) -> dict[str, Any]:
        """Positions of the environments, with the states of those whose simulators can export them (level 4)."""
        self._quick.count_steps()
        state, ids = super().state_dict(), self._in_flight.all_envs.ids
        return state | {"to_play": self._to_play.copy(), "envs": export_states(self.fleet, ids, self.slots_of(ids))}

    def load_state_dict(self, state: dict[str, Any]) -> list[int]:
        """Import the exported states; environments without one start a new episode, and are returned."""
        if "envs" not in state:  # saved before states were exported
            return super().load_state_dict(state)
        self._load_rows(state)
        self._pending.clear()
        self._to_play[:] = state["to_play"]
        ids = self._in_flight.all_envs.ids
        placed = ids[self._slots.placed(ids)]
        restored = import_states(self.fleet, placed, self._slots.find(placed), state["envs"])
        mask = sum(1 << env_id for env_id in restored)
        self._in_flight.in_flight &= ~mask
        self._pending.fresh &= ~mask
        rest = np.setdiff1d(ids, restored)
        with self.fleet.lock:
            self._rows.episode[rest] += 1
            self._pending.schedule_reset(rest)
            self._start_due()
        restarted: list[int] = rest.tolist()
        return restarted

    def close(self) -> None:
        """Leave the simulators; those that no other VecEnv uses are disconnected."""
        if hasattr(self, "_in_flight"):
            with self.fleet.lock:
                self._in_flight.closed = True
                self._free_slots()
            self._log.close()
        self._stop()

    def joined(self, session: SimulatorSession) -> None:
        self._slots.fill(self._sessions)
        self._start_due()
        self._rebalancer.plan(self._sessions)

    def lost(self, session: SimulatorSession, kind: str, reason: str) -> None:
        """A simulator is lost: its environments end their episodes and get slots in others."""
        ids = self._slots.leave(session)
        if not len(ids):
            return
        self._requested &= ~self._in_flight.sets.of(ids).mask
        if self._in_flight.started:
            stepping = self._in_flight.is_in_flight(ids)
            culprit = int(ids[stepping][0]) if stepping.any() else int(ids[0])
            self._quick.count_steps()
            self._report_lost(ids, culprit, kind, reason)
            self._rebalancer.forget(ids.tolist())
            between = np.isin(ids, list(self._ended))  # two episodes: the row of the last one is complete
            self._pending.schedule_reset(ids[between])
            self._pending.schedule_faults(ids[~between])
        self._slots.fill(self._sessions)
        self._start_due()

    def _wait(self, wait_for_all: bool, timeout_s: float) -> None:
        self.fleet.poll(timeout_s)
        if self._slots.unplaced:  # another VecEnv may have freed slots
            with self.fleet.lock:
                self._slots.fill(self._sessions)
                self._start_due()
        self._timeouts.check(0 if self.fleet.has_lent(self._member) else self._slots.unplaced)

    def _dispatch(self, chosen: IdSet, actions: list[Array]) -> None:
        rows, sets, deadline_s = self._rows, self._in_flight.sets, self._supervision.step_timeout_s
        batches = self._slots.by_simulator(chosen, sets)
        first = batches[0]
        if len(batches) == 1 and len(chosen.numbers) <= _max_rows(first.session):
            sent = first.session.simulator.action.write(actions, len(chosen.numbers))
            self._ask(first.session, _STEP, chosen, [first.slots, sent], self._stepped, deadline_s, clp.AUTORESET)
            return
        rows.write_actions(chosen, actions)
        for batch in batches:
            session = batch.session
            for chunk in batch.chunks(_max_rows(session), sets):
                chosen = chunk.chosen
                sent = session.simulator.action.write([leaf[chosen.index] for leaf in rows.action], len(chosen))
                self._ask(session, _STEP, chosen, [chunk.slots, sent], self._stepped, deadline_s, clp.AUTORESET)

    def _reset(self, env_ids: Array) -> None:
        """Start episodes, each with its own seed, in the slots of these environments."""
        rows, sets = self._rows, self._in_flight.sets
        self._quick.count_steps()
        for env_id in env_ids.tolist():
            rows.seed[env_id] = seeding.env_seed(self._seed, self._role, env_id, int(rows.episode[env_id]))
        rows.step[env_ids] = 0
        for batch in self._slots.by_simulator(sets.of(env_ids), sets) if len(env_ids) else ():
            for chunk in batch.chunks(batch.session.max_rows, sets):
                seeds = rows.seed[chunk.chosen.ids].astype("<u8").tobytes()
                self._ask(
                    batch.session, clp.Op.RESET, chunk.chosen, [chunk.slots, seeds], self._was_reset,
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
        self._requested |= chosen.mask
        done = partial(self._answered, session, chosen, take)
        session.submit(op, len(chosen.numbers), payload, done, deadline_s=deadline_s, flags=flags)

    def _answered(self, session: SimulatorSession, chosen: IdSet, take: Take, reply: Message) -> None:
        if self._in_flight.closed:
            self._requested &= ~chosen.mask
            self._free_slots()
            return
        if reply.op == _STEP and self._quick.take(session.simulator, chosen, reply):
            self._requested &= ~chosen.mask
            self._pending.complete(chosen)
            return
        answer = read_answer(session.simulator, len(chosen), reply)
        self._requested &= ~chosen.mask
        take(session, chosen, answer)

    def _stepped(self, session: SimulatorSession, chosen: IdSet, answer: StepReply) -> None:
        rows, ids, flags = self._rows, chosen.ids, answer.flags
        answer.write(rows, chosen, self._to_play)
        self._quick.count_steps()
        rows.step[chosen.index] += 1
        rows.no_flags(chosen.index)
        if not np.count_nonzero(flags):
            self._pending.complete(chosen)
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
            self._rebalancer.check(self._sessions)
        movers = self._move(started.tolist()) if self._rebalancer.moving else []
        if absent or movers:
            ids = ids[~np.isin(ids, absent + movers)]
        if len(ids):
            self._pending.complete(self._in_flight.sets.of(ids))

    def _take_faults(self, session: SimulatorSession, ids: Array, answer: StepReply) -> list[int]:
        """Report environments that failed within a simulator; returns those that have nothing to deliver yet."""
        waits = []
        for row in np.flatnonzero(answer.status).tolist():
            env_id, status = int(ids[row]), int(answer.status[row])
            detail = f"in {session.name}: {clp.status_name(status)} {answer.text(row)}"
            self._log.record(self._rows.fault(env_id, answer.kind(row), detail))
            if not answer.flags[row] & clp.FAULTY:  # between two episodes, which costs no row
                continue
            if answer.flags[row] & clp.FIRST:  # it has restarted by itself
                self._rows.episode[env_id] += 1
                self._rows.step[env_id] = 0
                self._rows.mark_lost(env_id)
            else:
                waits.append(env_id)
        if waits:
            self._pending.schedule_faults(np.array(waits))
            self._start_due()
        return waits

    def _was_reset(self, session: SimulatorSession, chosen: IdSet, answer: StepReply) -> None:
        rows, ids = self._rows, chosen.ids
        answer.write(rows, chosen, self._to_play)
        self.continued[ids] = (answer.flags & clp.FIRST) == 0
        rows.reward[ids] = rows.raw_reward[ids] = 0.0
        rows.no_flags(ids)
        rows.flags[ids, FIRST] = True
        failed = ids[(answer.flags & clp.FAULTY) != 0]
        if len(failed):
            for row in np.flatnonzero(answer.flags & clp.FAULTY).tolist():
                detail = f"in reset, in {session.name}: {answer.text(row)}"
                self._log.record(rows.fault(int(ids[row]), answer.kind(row), detail))
            rows.episode[failed] += 1
            self._pending.schedule_reset(failed)
            self._start_due()
            ids = ids[(answer.flags & clp.FAULTY) == 0]
        for env_id in self._ended.keys() & set(ids.tolist()):
            rows.table[env_id] = self._ended.pop(env_id)
        if len(ids):
            self._pending.complete(self._in_flight.sets.of(ids))

    def _start_due(self) -> None:
        """Start the next episodes of environments that lost their simulator and have a new slot."""
        if not self._in_flight.started:
            return
        self._quick.count_steps()
        ids = self._in_flight.all_envs.ids
        due = self._pending.take_resets(ids[self._slots.placed(ids)])
        if len(due):
            self._reset(due)

    def _move(self, ended: list[int]) -> list[int]:
        """Start the next episodes of environments that should move, among those that ended; returns them."""
        movers = self._rebalancer.move(ended, self._sessions)
        for env_id in movers:
            self._ended[env_id] = self._rows.table[env_id].copy()
        self._reset(np.array(movers, np.int64))
        return movers

    @property
    def _sessions(self) -> list[SimulatorSession]:
        return list(self.fleet.sessions.values())

    def _free_slots(self) -> None:
        """All but those of requests in flight, which are freed with the reply."""
        self._slots.leave_all(but=self._in_flight.sets.bools(self._requested))


def _leave(fleet: Fleet, member: FleetMember, release: Callable[[], Any]) -> None:
    if member in fleet.members:
        fleet.members.remove(member)
    release()


def _max_rows(session: SimulatorSession) -> int:
    return 1 if session.row_s > _SLOW_ROW_S else session.max_rows
