"""A VecEnv's requests to simulators, and the handling of their replies."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from corral.core import seeding
from corral.core.encoding import Buffer
from corral.core.types import Array
from corral.envs.backends.row_vec_env import AsyncVecEnv
from corral.envs.backends.simulators.replies import QuickSteps, StepReply, read_answer
from corral.envs.backends.simulators.slots import Rebalancer, SlotTable
from corral.envs.stepping.id_set import IdSet
from corral.envs.stepping.rows import FIRST
from corral.link import protocol as clp
from corral.link.client.fleet import Fleet
from corral.link.client.session import SimulatorSession
from corral.link.message import Message

_STEP = int(clp.Op.STEP)
_SLOW_ROW_S = 500e-6  # slower steps are requested one by one, so that `recv(min_ready)` gets them early

Take = Callable[[SimulatorSession, IdSet, StepReply], None]


class RequestingVecEnv(AsyncVecEnv):
    """A VecEnv that steps and resets environments in the slots of simulators."""

    fleet: Fleet
    _slots: SlotTable
    _rebalancer: Rebalancer
    _quick: QuickSteps
    _requested: int  # mask of environments in requests
    _to_play: Array  # [n] int8, the player to move
    _ended: dict[int, Array]  # final rows of environments that are moving to another simulator

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


def _max_rows(session: SimulatorSession) -> int:
    return 1 if session.row_s > _SLOW_ROW_S else session.max_rows
