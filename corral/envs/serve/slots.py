"""Environments of one session of a Python simulator: slots, and the operations on them."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from corral.core.encoding import Buffer
from corral.core.errors import UserError
from corral.core.gym_env import EnvFactory
from corral.core.types import Array, EnvSpec
from corral.envs.serve.state_errors import (
    BadRequest,
    Problem,
    failure_of,
    pack_state,
    problems_of,
    require_id,
    unpack_state,
)
from corral.envs.stepping.group import EnvGroup
from corral.envs.stepping.id_set import IdSet, IdSets
from corral.envs.stepping.live_row import RowEnv
from corral.envs.stepping.rows import FAULTY, FIRST, GAME_OVER, TERMINATED, TRUNCATED, EnvRows
from corral.envs.supervision import IDLE, Fault
from corral.link import protocol as clp
from corral.link.control import Budget
from corral.link.layout import RowsLayout, layout_hash, space_group
from corral.snapshot.env_states import EnvStates
from corral.snapshot.keeper import CannotSave, StateKeeper
from corral.snapshot.keepers.choose import make_scratch
from corral.snapshot.scratch_env import KeptState, StepRows
from corral.snapshot.states import UnknownState

ROWS = RowsLayout(players=1, raw_reward=True)
REWARD, RAW, FLAGS, STATUS = range(4)
_LARGEST_SEED = 2**63
_MAX_BYTES = 4 << 30


def max_slots(spec: EnvSpec, wanted: int) -> int:
    """Number of environments of this kind per session, at most `wanted`, whose rows fit into memory."""
    return max(1, min(wanted, _MAX_BYTES // EnvRows.nbytes(spec, 1)))


class SlotReply:
    """Payload of a reply, and messages about rows."""

    def __init__(self, payload: Sequence[Buffer] = (), messages: dict[str, str] | None = None):
        self.payload, self.messages = list(payload), messages


class Slots:
    """Some environments, made when their slot is first reset."""

    def __init__(
        self, factory: EnvFactory, name: str, spec: EnvSpec, slots: int, keeper: StateKeeper | None, budget: Budget
    ):
        self.spec, self._slots, self._factory = spec, slots, factory
        # The system allocates memory on first write, so unused slots cost nothing.
        self._rows, self._sets = EnvRows(spec, slots, mmap.mmap(-1, EnvRows.nbytes(spec, slots))), IdSets(slots)
        self._group = EnvGroup(dict.fromkeys(range(slots), factory), name, self._report, [IDLE])
        self._group.attach(self._rows, self._sets)
        self.states: EnvStates | None = None
        if keeper is not None:
            live = [RowEnv(self._group, slot) for slot in range(slots)]
            makers, memory_mb = [partial(make_scratch, factory)] * slots, budget.bytes / 1e6
            self.states = EnvStates(spec, live, makers, memory_mb, max_states=budget.count, keeper=keeper)
        self._obs, self._action, self._table = space_group(spec.observation), space_group(spec.action), ROWS.group()
        self._layout = layout_hash(spec.observation, spec.action)
        self._problems: dict[int, tuple[clp.Status, str]] = {}
        self._playing = np.zeros(slots, np.bool_)
        self.steps = self.episodes = self.faults = 0

    def close(self) -> None:
        self._group.close()
        if self.states is not None:
            self.states.close()

    def reset(self, batch: int, payload: Sequence[Buffer]) -> SlotReply:
        slots, seeds = _columns(payload, batch, "<u4", "<u8")
        chosen = self._choose(slots)
        self._problems.clear()
        for slot, seed in zip(chosen.numbers, seeds.tolist(), strict=True):
            try:
                self._group.start(slot, seed % _LARGEST_SEED)
                self._playing[slot] = True
                self.episodes += 1
            except (Exception, SystemExit) as error:  # any error is reported in the row
                self._problems[slot] = clp.Status.E_ENV, f"reset() raised {error!r}"
                self._playing[slot] = self._rows.flags[slot] = False
                self._rows.flags[slot, [TRUNCATED, FAULTY]] = True
        return self._answer(chosen)

    def step(self, batch: int, payload: Sequence[Buffer], autoreset: bool) -> SlotReply:
        """Step slots; with `autoreset`, ended episodes are followed by new ones."""
        if len(payload) != 2:
            raise BadRequest(f"{len(payload)} frames, expected slots and actions")
        (slots,) = _columns(payload[:1], batch, "<u4")
        chosen = self._choose(slots)
        actions = self.read_actions(payload[1], batch)
        if not self._playing[chosen.ids].all():
            raise BadRequest("a slot without an episode", clp.Status.E_NO_EPISODE)
        if not autoreset:
            return self._step_once(chosen, actions)
        self._rows.write_actions(chosen, actions)
        self._problems.clear()
        self._rows.flip(chosen)
        self._group.step(chosen, lambda done: None)
        self.steps += batch
        return self._answer(chosen)

    def _step_once(self, chosen: IdSet, actions: list[Array]) -> SlotReply:
        steps = StepRows(self.spec, len(chosen))
        for row, slot in enumerate(chosen.numbers):
            env = self._group.envs[slot]
            steps.step(row, partial(env.step, self._action_of(actions, row)))
            self._group.replace(slot, env, steps.row(row))
            self._playing[slot] = not steps.is_over(row)
        self.steps += len(chosen)
        return self._step_reply(steps, {})

    def save(self, batch: int, payload: Sequence[Buffer]) -> SlotReply:
        slots, ids = _columns(payload, batch, "<u4", "<u8")
        chosen = self._choose(slots)

        def save(slot: int, key: int) -> None:
            if not self._playing[slot]:
                raise BadRequest("the slot has no episode", clp.Status.E_NO_EPISODE)
            require_id(key)
            self._kept().save_env(key, slot)

        return self._status_reply(problems_of(save, chosen.numbers, ids.tolist()))

    def load(self, batch: int, payload: Sequence[Buffer], want_obs: bool) -> SlotReply:
        slots, ids = _columns(payload, batch, "<u4", "<u8")
        chosen, steps = self._choose(slots), StepRows(self.spec, batch)

        def load(row: int, slot: int, key: int) -> None:
            state = self._get(key)
            env = self._group.envs.get(slot) or make_scratch(self._factory)
            self._kept().load_into(env, state)
            assert state.obs is not None  # a slot always has an observation
            self._group.replace(slot, env, state.obs)
            self._playing[slot] = not state.over
            steps.show(row, state.obs)

        reply = self._step_reply(steps, problems_of(load, range(batch), chosen.numbers, ids.tolist()))
        return reply if want_obs else SlotReply(reply.payload[:1], reply.messages)

    def expand(self, batch: int, payload: Sequence[Buffer]) -> SlotReply:
        if not 3 <= len(payload) <= 4:
            raise BadRequest(f"{len(payload)} frames, expected parents, actions, children and maybe seeds")
        parents, children = _columns([payload[0], payload[2]], batch, "<u8", "<u8")
        actions = self.read_actions(payload[1], batch)
        seeds = _columns(payload[3:], batch, "<u8")[0] if len(payload) == 4 else np.zeros(batch, np.uint64)
        steps = StepRows(self.spec, batch)
        states = [self._find_live(key) for key in parents.tolist()]  # before a child replaces a parent

        def expand(row: int) -> None:
            state, child = _raised(states[row]), int(children[row])
            env = state.scratch.enter(state, int(seeds[row]) or None)
            steps.step(row, partial(state.scratch.keeper.step, env, self._action_of(actions, row)))
            if child and not steps.failed[row]:
                self._kept().save_scratch(child, state, steps.row(row), steps.is_over(row))

        return self._step_reply(steps, problems_of(expand, range(batch)))

    def rollout(self, batch: int, payload: Sequence[Buffer], steps: int) -> SlotReply:
        if len(payload) != 2 or steps < 1:
            raise BadRequest(f"{len(payload)} frames and {steps} steps, expected parents and actions, and steps from 1")
        (parents,) = _columns(payload[:1], batch, "<u8")
        actions = self.read_actions(payload[1], batch * steps)
        rewards, lengths, last = np.zeros((batch, steps)), np.zeros(batch, "<u4"), StepRows(self.spec, batch)

        def roll(row: int) -> None:
            state = _raised(self._find_live(int(parents[row])))
            env = state.scratch.enter(state)
            for k in range(steps):
                last.step(row, partial(state.scratch.keeper.step, env, self._action_of(actions, row * steps + k)))
                rewards[row, k], lengths[row] = last.reward[row], k + 1
                if last.is_over(row):
                    break

        problems = problems_of(roll, range(batch))
        last.reward[:] = rewards.sum(1)
        reply = self._step_reply(last, problems)
        return SlotReply([rewards.tobytes(), lengths.tobytes(), *reply.payload], reply.messages)

    def export(self, batch: int, payload: Sequence[Buffer]) -> SlotReply:
        (ids,) = _columns(payload, batch, "<u8")
        blobs = [b""] * batch

        def pack(row: int, key: int) -> None:
            state = self._get(key)
            if not isinstance(state.kept, bytes):
                raise CannotSave("states of this environment cannot be exported")
            blobs[row] = pack_state(self._layout, state)

        reply = self._status_reply(problems_of(pack, range(batch), ids.tolist()))
        sizes = np.array([len(blob) for blob in blobs], "<u8")
        return SlotReply([*reply.payload, sizes.tobytes(), b"".join(blobs)], reply.messages)

    def import_states(self, batch: int, payload: Sequence[Buffer]) -> SlotReply:
        if len(payload) != 3:
            raise BadRequest(f"{len(payload)} frames, expected ids, sizes and states")
        ids, sizes = _columns(payload[:2], batch, "<u8", "<u8")
        if int(sizes.astype(object).sum()) != len(payload[2]):
            raise BadRequest("sizes that are not those of the states")
        ends = np.cumsum(sizes).tolist()
        blobs = [bytes(payload[2][end - size : end]) for size, end in zip(sizes.tolist(), ends, strict=True)]

        def unpack(key: int, blob: bytes) -> None:
            require_id(key)
            unpack_state(self._layout, self._kept(), key, blob)

        return self._status_reply(problems_of(unpack, ids.tolist(), blobs))

    def read_actions(self, frame: Buffer, rows: int) -> list[Array]:
        try:
            leaves = [leaf.copy() for leaf in self._action.read(frame, rows)]
            return self.spec.action.batch(self.spec.action.unflatten(leaves), rows)
        except UserError as error:
            raise BadRequest(str(error)) from error

    def _kept(self) -> EnvStates:
        if self.states is None:
            raise CannotSave("the state of this environment cannot be saved")
        return self.states

    def _get(self, key: int) -> KeptState:
        if self.states is None:
            raise UnknownState(f"There is no state {key}: this environment's state cannot be saved.")
        return self.states.get(key)

    def _find_live(self, key: int) -> KeptState | UserError:
        """The state with this id if it can be stepped from, else the error."""
        try:
            self._get(key)
            return self._kept().get_live(key)
        except UserError as error:
            return error

    def _action_of(self, actions: list[Array], row: int) -> Any:
        return self.spec.action.unflatten([leaf[row] for leaf in actions])

    def _step_reply(self, steps: StepRows, problems: dict[int, Problem | None]) -> SlotReply:
        """Rows of steps and their observations; rows with a problem have its status."""
        frame, table = self._table.make(len(steps.reward))
        out, leaves = self._obs.make(len(steps.reward))
        table[REWARD][:, 0] = table[RAW][:, 0] = steps.reward
        table[FLAGS][:] = (
            steps.terminated * clp.TERMINATED + steps.truncated * clp.TRUNCATED + steps.failed * clp.FAULTY
        )
        for leaf, value in zip(leaves, steps.leaves, strict=True):
            leaf[...] = value
        failed = {row: failure_of(error) for row, error in steps.errors.items()}
        return SlotReply([frame, out], _write_status(table, {**problems, **failed}))

    def _status_reply(self, problems: dict[int, Problem | None]) -> SlotReply:
        frame, table = self._table.make(len(problems))
        return SlotReply([frame], _write_status(table, problems))

    def _choose(self, slots: Array) -> IdSet:
        if slots.max() >= self._slots:
            raise BadRequest(f"slot {slots.max()}, there are {self._slots}")
        try:
            return self._sets.of(slots.astype(np.int64))
        except UserError as error:
            raise BadRequest("a slot given twice") from error

    def _answer(self, chosen: IdSet) -> SlotReply:
        rows, ids, batch = self._rows, chosen.ids, len(chosen)
        frame, table = self._table.make(batch)
        table[REWARD][:, 0], table[RAW][:, 0] = rows.reward[ids], rows.raw_reward[ids]
        obs = rows.current(chosen, rows.half(chosen))
        payload: list[Buffer] = [frame, self._obs.write([np.ascontiguousarray(leaf) for leaf in obs], batch)]
        flags = rows.flags[ids]
        messages: dict[str, str] = {}
        if np.count_nonzero(flags) or self._problems:
            ended = flags[:, TERMINATED] | flags[:, TRUNCATED]
            bits = flags[:, TERMINATED] * clp.TERMINATED + flags[:, TRUNCATED] * clp.TRUNCATED
            bits = bits + flags[:, FAULTY] * clp.FAULTY + flags[:, FIRST] * clp.FIRST
            table[FLAGS][:] = bits + (ended & ~flags[:, GAME_OVER] & ~flags[:, FAULTY]) * clp.LIFE
            messages = _write_status(table, {row: self._problems.get(i) for row, i in enumerate(chosen.numbers)})
            good = ids[ended & ~flags[:, FAULTY]]
            self.episodes += int(np.count_nonzero(ended))
            if len(good):
                payload.append(self._obs.write([leaf[good] for leaf in rows.final], len(good)))
        return SlotReply(payload, messages)

    def _report(self, fault: Fault) -> None:
        self.faults += 1
        status = clp.Status.E_NOT_FINITE if fault.kind == "nan" else clp.Status.E_ENV
        self._problems[fault.env_id] = status, fault.detail


def _raised(found: KeptState | UserError) -> KeptState:
    if isinstance(found, UserError):
        raise found
    return found


def _write_status(table: list[Array], problems: dict[int, Problem | None]) -> dict[str, str]:
    found = {row: problem for row, problem in problems.items() if problem is not None}
    for row, (status, _) in found.items():
        table[STATUS][row] = status
    return {str(row): message for row, (_, message) in found.items()}


def _columns(frames: Sequence[Buffer], batch: int, *dtypes: str) -> list[Array]:
    if len(frames) != len(dtypes):
        raise BadRequest(f"{len(frames)} frames, expected {len(dtypes)}")
    out = []
    for frame, dtype in zip(frames, dtypes, strict=True):
        size = batch * np.dtype(dtype).itemsize
        if len(frame) != size:
            raise BadRequest(f"a frame of {len(frame)} bytes for {batch} rows, expected {size}")
        out.append(np.frombuffer(frame, dtype))
    return out
