"""Environments of one session of a Python simulator: slots, and what requests do to them."""

from __future__ import annotations

import mmap
import struct
import zlib
from collections.abc import Sequence

import numpy as np

from corral.core.encoding import Buffer, DecodeError, decode, encode
from corral.core.errors import UserError
from corral.core.gym_env import EnvFactory
from corral.core.types import Array, EnvSpec
from corral.envs.serve.states import Expanded, State, States, step_once
from corral.envs.stepping.group import EnvGroup
from corral.envs.stepping.id_set import IdSet, IdSets
from corral.envs.stepping.rows import FAULTY, FIRST, GAME_OVER, TERMINATED, TRUNCATED, EnvRows
from corral.envs.supervision import IDLE, Fault
from corral.link import protocol as clp
from corral.link.layout import RowsLayout, layout_hash, space_group
from corral.snapshot.keeper import CannotSave

# Exported states of Python environments: bytes that know what they are a state of.


_HEAD = struct.Struct("<4sII")  # magic, layout of the spaces, CRC-32 of the rest
_MAGIC = b"CPY1"


def pack_state(layout: int, state: State) -> bytes:
    """A state that is kept as bytes, with its last observation."""
    body = b"".join(encode([state.kept, state.over, state.obs]))
    return _HEAD.pack(_MAGIC, layout, zlib.crc32(body)) + body


def unpack_state(layout: int, states: States, key: int, blob: bytes) -> tuple[int, str]:
    """Keep a state that `pack_state` packed, here or elsewhere; returns status and words."""
    bad = clp.Status.E_BAD_REQUEST
    if len(blob) < _HEAD.size:
        return bad, "too few bytes for a state"
    magic, theirs, crc = _HEAD.unpack_from(blob)
    body = blob[_HEAD.size :]
    if magic != _MAGIC or theirs != layout:
        return bad, "a state of another environment"
    if zlib.crc32(body) != crc:
        return bad, "a damaged state"
    try:
        kept, over, obs = decode(body)
        leaves = [np.array(leaf) for leaf in obs]
        states.check(kept, leaves)
    except (DecodeError, ValueError, TypeError, CannotSave) as error:
        return bad, f"not a state of this environment ({error})"
    return states.put(key, kept, leaves, bool(over))


ROWS = RowsLayout(players=1, raw_reward=True)
REWARD, RAW, FLAGS, STATUS = range(4)
_LARGEST_SEED = 2**63
_MAX_BYTES = 4 << 30


def most_slots(spec: EnvSpec, wanted: int) -> int:
    """How many environments of this kind a session may have, at most `wanted`, so that their rows fit into memory."""
    return max(1, min(wanted, _MAX_BYTES // EnvRows.nbytes(spec, 1)))


class BadRequest(Exception):
    """A request that cannot be carried out, found out before anything has changed."""

    def __init__(self, text: str, status: clp.Status = clp.Status.E_BAD_REQUEST):
        super().__init__(text)
        self.status = status


class SlotReply:
    """Payload of a reply, and words for rows that went wrong."""

    def __init__(self, payload: Sequence[Buffer] = (), words: dict[str, str] | None = None):
        self.payload, self.words = list(payload), words


class Slots:
    """Some environments, made when their slot is first reset."""

    def __init__(self, factory: EnvFactory, name: str, spec: EnvSpec, slots: int, states: States):
        self.spec, self._slots, self.states = spec, slots, states
        # The system gives memory when it is first written to, so slots that nobody uses cost nothing.
        self._rows, self._sets = EnvRows(spec, slots, mmap.mmap(-1, EnvRows.nbytes(spec, slots))), IdSets(slots)
        self._group = EnvGroup(dict.fromkeys(range(slots), factory), name, self._report, [IDLE])
        self._group.attach(self._rows, self._sets)
        self._obs, self._action, self._table = space_group(spec.observation), space_group(spec.action), ROWS.group()
        self._layout = layout_hash(spec.observation, spec.action)
        self._words: dict[int, tuple[clp.Status, str]] = {}
        self._playing = np.zeros(slots, np.bool_)
        self.steps = self.episodes = self.faults = 0

    def close(self) -> None:
        """Close the environments."""
        self._group.close()
        self.states.close()

    def reset(self, batch: int, payload: Sequence[Buffer]) -> SlotReply:
        """Start episodes with the seeds given."""
        slots, seeds = _columns(payload, batch, "<u4", "<u8")
        chosen = self._choose(slots)
        self._words.clear()
        failed = []
        for slot, seed in zip(chosen.numbers, seeds.tolist(), strict=True):
            try:
                self._group.start(slot, seed % _LARGEST_SEED)
            except (Exception, SystemExit) as error:  # whatever it is, the row says so
                self._words[slot] = clp.Status.E_ENV, f"reset() raised {error!r}"
                failed.append(slot)
        self._playing[chosen.ids] = True
        self._playing[failed] = False
        self.episodes += batch - len(failed)
        for slot in failed:  # nothing is there
            self._rows.flags[slot] = False
            self._rows.flags[slot, [TRUNCATED, FAULTY]] = True
        return self._answer(chosen)

    def step(self, batch: int, payload: Sequence[Buffer], autoreset: bool) -> SlotReply:
        """Step slots with actions; with `autoreset`, episodes that end are followed by others."""
        if len(payload) != 2:
            raise BadRequest(f"{len(payload)} frames, expected slots and actions")
        (slots,) = _columns(payload[:1], batch, "<u4")
        chosen = self._choose(slots)
        actions = self.read_actions(payload[1], batch)
        if not self._playing[chosen.ids].all():
            raise BadRequest("a slot without an episode", clp.Status.E_NO_EPISODE)
        if not autoreset:
            return self._step_once(chosen, actions)
        for row, leaf in zip(self._rows.action, actions, strict=True):
            row[chosen.index] = leaf
        self._words.clear()
        self._rows.flip(chosen)
        self._group.step(chosen, lambda done: None)
        self.steps += batch
        return self._answer(chosen)

    def _step_once(self, chosen: IdSet, actions: list[Array]) -> SlotReply:
        """Step slots and leave them where they are, at the end of their episodes too."""
        batch = len(chosen)
        frame, table = self._table.make(batch)
        out, leaves = self._obs.make(batch)
        words = {}
        for row, slot in enumerate(chosen.numbers):
            env = self._group.environment(slot)
            step = step_once(env, self.spec.action.unflatten([leaf[row] for leaf in actions]), self.spec.observation)
            self._group.replace(slot, env, step.obs)
            self._playing[slot] = not step.flags
            _put(table, leaves, row, step)
            if step.text:
                words[str(row)] = step.text
        self.steps += batch
        return SlotReply([frame, out], words)

    def save(self, batch: int, payload: Sequence[Buffer]) -> SlotReply:
        """Keep the states of slots by the ids given."""
        slots, ids = _columns(payload, batch, "<u4", "<u8")
        chosen = self._choose(slots)
        obs = self._rows.current(chosen, None)
        frame, table = self._table.make(batch)
        words = {}
        for row, (slot, key) in enumerate(zip(chosen.numbers, ids.tolist(), strict=True)):
            leaves = [leaf[row].copy() for leaf in obs]
            env = self._group.environment(slot) if self._playing[slot] else None
            status, text = self.states.save(key, env, leaves)
            table[STATUS][row] = status
            if text:
                words[str(row)] = text
        return SlotReply([frame], words)

    def load(self, batch: int, payload: Sequence[Buffer], want_obs: bool) -> SlotReply:
        """Put slots where their states were."""
        slots, ids = _columns(payload, batch, "<u4", "<u8")
        chosen = self._choose(slots)
        frame, table = self._table.make(batch)
        out, leaves = self._obs.make(batch)
        for row, (slot, key) in enumerate(zip(chosen.numbers, ids.tolist(), strict=True)):
            state = self.states.get(key)
            if state is None:
                table[STATUS][row] = clp.Status.E_UNKNOWN_STATE
                continue
            try:
                env = self.states.put_into(self._group.find(slot), state)
            except CannotSave:
                table[STATUS][row] = clp.Status.E_UNSUPPORTED
                continue
            self._group.replace(slot, env, state.obs)
            self._playing[slot] = not state.over
            for leaf, value in zip(leaves, state.obs, strict=True):
                leaf[row] = value
        return SlotReply([frame, out] if want_obs else [frame])

    def expand(self, batch: int, payload: Sequence[Buffer]) -> SlotReply:
        """Step copies of states and keep what comes out."""
        if not 3 <= len(payload) <= 4:
            raise BadRequest(f"{len(payload)} frames, expected parents, actions, children and maybe seeds")
        parents, children = _columns([payload[0], payload[2]], batch, "<u8", "<u8")
        actions = self.read_actions(payload[1], batch)
        seeds = _columns(payload[3:], batch, "<u8")[0] if len(payload) == 4 else np.zeros(batch, np.uint64)
        frame, table = self._table.make(batch)
        out, leaves = self._obs.make(batch)
        words = {}
        states = [self.states.get(key) for key in parents.tolist()]  # a child may take the place of a parent
        for row, state in enumerate(states):
            action = self.spec.action.unflatten([leaf[row] for leaf in actions])
            step = self.states.expand(state, action, int(children[row]), int(seeds[row]))
            _put(table, leaves, row, step)
            if step.text:
                words[str(row)] = step.text
        return SlotReply([frame, out], words)

    def rollout(self, batch: int, payload: Sequence[Buffer], steps: int) -> SlotReply:
        """Step copies of states several times."""
        if len(payload) != 2 or steps < 1:
            raise BadRequest(f"{len(payload)} frames and {steps} steps, expected parents and actions, and steps from 1")
        (parents,) = _columns(payload[:1], batch, "<u8")
        actions = self.read_actions(payload[1], batch * steps)
        rewards, lengths = np.zeros((batch, steps)), np.zeros(batch, "<u4")
        frame, table = self._table.make(batch)
        out, leaves = self._obs.make(batch)
        words = {}
        for row in range(batch):
            mine = [self.spec.action.unflatten([leaf[row * steps + k] for leaf in actions]) for k in range(steps)]
            last, got = self.states.rollout(self.states.get(int(parents[row])), mine)
            rewards[row, : len(got)], lengths[row] = got, len(got)
            _put(table, leaves, row, last)
            table[REWARD][row] = table[RAW][row] = sum(got)
            if last.text:
                words[str(row)] = last.text
        return SlotReply([rewards.tobytes(), lengths.tobytes(), frame, out], words)

    def export(self, batch: int, payload: Sequence[Buffer]) -> SlotReply:
        """States as bytes."""
        (ids,) = _columns(payload, batch, "<u8")
        frame, table = self._table.make(batch)
        blobs, words = [], {}
        for row, key in enumerate(ids.tolist()):
            state = self.states.get(key)
            if state is None or not isinstance(state.kept, bytes):
                status = clp.Status.E_UNKNOWN_STATE if state is None else clp.Status.E_UNSUPPORTED
                table[STATUS][row], words[str(row)] = status, "there is no state that could be exported"
                blobs.append(b"")
                continue
            blobs.append(pack_state(self._layout, state))
        sizes = np.array([len(blob) for blob in blobs], "<u8")
        return SlotReply([frame, sizes.tobytes(), b"".join(blobs)], words)

    def take_in(self, batch: int, payload: Sequence[Buffer]) -> SlotReply:
        """States from bytes."""
        if len(payload) != 3:
            raise BadRequest(f"{len(payload)} frames, expected ids, sizes and states")
        ids, sizes = _columns(payload[:2], batch, "<u8", "<u8")
        if int(sizes.astype(object).sum()) != len(payload[2]):
            raise BadRequest("sizes that are not those of the states")
        frame, table = self._table.make(batch)
        words, at = {}, 0
        for row, (key, size) in enumerate(zip(ids.tolist(), sizes.tolist(), strict=True)):
            table[STATUS][row], text = unpack_state(self._layout, self.states, key, bytes(payload[2][at : at + size]))
            at += size
            if text:
                words[str(row)] = text
        return SlotReply([frame], words)

    def read_actions(self, frame: Buffer, rows: int) -> list[Array]:
        """Actions, checked against their space."""
        try:
            leaves = [leaf.copy() for leaf in self._action.read(frame, rows)]
            return self.spec.action.batch(self.spec.action.unflatten(leaves), rows)
        except UserError as error:
            raise BadRequest(str(error)) from error

    # -- within --------------------------------------------------------------------------------------------

    def _choose(self, slots: Array) -> IdSet:
        if slots.max() >= self._slots:
            raise BadRequest(f"slot {slots.max()}, there are {self._slots}")
        try:
            return self._sets.of(slots.astype(np.int64))
        except UserError as error:
            raise BadRequest("a slot named twice") from error

    def _answer(self, chosen: IdSet) -> SlotReply:
        rows, ids, batch = self._rows, chosen.ids, len(chosen)
        frame, table = self._table.make(batch)
        table[REWARD][:, 0], table[RAW][:, 0] = rows.reward[ids], rows.raw_reward[ids]
        obs = rows.current(chosen, rows.half(chosen))
        payload: list[Buffer] = [frame, self._obs.write([np.ascontiguousarray(leaf) for leaf in obs], batch)]
        flags = rows.flags[ids]
        words: dict[str, str] | None = None
        if np.count_nonzero(flags) or self._words:
            ended = flags[:, TERMINATED] | flags[:, TRUNCATED]
            bits = flags[:, TERMINATED] * clp.TERMINATED + flags[:, TRUNCATED] * clp.TRUNCATED
            bits = bits + flags[:, FAULTY] * clp.FAULTY + flags[:, FIRST] * clp.FIRST
            table[FLAGS][:] = bits + (ended & ~flags[:, GAME_OVER] & ~flags[:, FAULTY]) * clp.LIFE
            words = self._say(chosen, table)
            good = ids[ended & ~flags[:, FAULTY]]
            self.episodes += int(np.count_nonzero(ended))
            if len(good):
                payload.append(self._obs.write([leaf[good] for leaf in rows.final], len(good)))
        return SlotReply(payload, words)

    def _say(self, chosen: IdSet, table: list[Array]) -> dict[str, str] | None:
        words = {}
        for row, slot in enumerate(chosen.numbers):
            if slot in self._words:
                table[STATUS][row], words[str(row)] = self._words[slot]
        return words or None

    def _report(self, fault: Fault) -> None:
        self.faults += 1
        status = clp.Status.E_NOT_FINITE if fault.kind == "nan" else clp.Status.E_ENV
        self._words[fault.env_id] = status, fault.detail


def _put(table: list[Array], leaves: list[Array], row: int, step: Expanded) -> None:
    table[REWARD][row] = table[RAW][row] = step.reward
    table[FLAGS][row], table[STATUS][row] = step.flags, step.status
    for leaf, value in zip(leaves, step.obs, strict=True):
        leaf[row] = value


def _columns(frames: Sequence[Buffer], batch: int, *dtypes: str) -> list[Array]:
    """One number per row from each frame."""
    if len(frames) != len(dtypes):
        raise BadRequest(f"{len(frames)} frames, expected {len(dtypes)}")
    out = []
    for frame, dtype in zip(frames, dtypes, strict=True):
        size = batch * np.dtype(dtype).itemsize
        if len(frame) != size:
            raise BadRequest(f"a frame of {len(frame)} bytes for {batch} rows, expected {size}")
        out.append(np.frombuffer(frame, dtype))
    return out
