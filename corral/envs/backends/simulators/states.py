"""`LinkStates`: states inside external simulators, saved where their environments are, and stepped by one message each.

Only ids and actions are sent, and observations and rewards come back. The slots of environments are read by `save` and
written by `load` alone. When a simulator disconnects, its states are lost: their observations are still known here, but
every step from them fails. Planning continues, and the environments end their episodes at their next step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium.spaces import Discrete

from corral.core.encoding import Buffer
from corral.core.errors import EnvFailed, UserError
from corral.core.types import Array, Tree, tree_map
from corral.envs.backends.simulators.foresight import foresees
from corral.envs.backends.simulators.slots import EnvSlots
from corral.link import protocol as clp
from corral.link.client.session import SimulatorSession
from corral.link.client.states import RowChunk, StateClient, StateReplies, ask, read_rollout, split, u8
from corral.link.message import BadMessage, Message
from corral.link.protocol import rows_per_message
from corral.snapshot.array_states import LOST, StateIndex
from corral.snapshot.states import Expansion, FailedSteps, Level, Rollouts, States, Views, log, warn_once

if TYPE_CHECKING:
    from corral.envs.backends.simulators.vec_env import LinkVecEnv

_MASK = "action_mask"
Miss = Callable[[Any, str], None]
_FIRST_CALLS, _EVERY_CALLS, _SOME = 4, 64, 16  # when to test for randomness, and with how many steps


class LinkStates(States):
    """States of the environments of a LinkVecEnv, each in the simulator of its environment.

    Args:
        vec: the environments; it may be stepped meanwhile.
        memory_mb: for observations, which are kept here.
        timeout_s: for every request; a simulator that takes longer is disconnected.
    """

    def __init__(self, vec: LinkVecEnv, memory_mb: float = 1024.0, timeout_s: float = 60.0):
        self._vec, self._fleet, self._timeout_s = vec, vec.fleet, timeout_s
        self.spec, self.players = vec.spec, vec.fleet.players
        if self.players > 2:
            raise UserError(f"{self.spec.name} has {self.players} players; search supports one or two.")
        sessions = list(self._fleet.sessions.values())
        if not sessions:
            raise EnvFailed(f"No simulator of {self.spec.name} is connected.")
        self._simulator = sessions[0].simulator  # requests here use what is the same for all
        self._homes: list[SimulatorSession] = []
        self._bases = np.zeros(0, np.int64)  # offset from local to remote ids, for each of them
        self._index = StateIndex(self.spec.observation.leaves, memory_mb, self.spec.name)
        self._mask, self._failed_steps = self._find_mask(), FailedSteps(self.spec.name)
        self._calls, self._probes = 0, np.random.default_rng(0)
        self.level = Level.PORTABLE
        for session in sessions:
            self._home_of(session)
            self.level = min(self.level, Level(session.simulator.hello.level))
        if "reseed" not in self._simulator.hello.capabilities:
            self._look_for_foreseen(sessions[0])

    def new_ids(self, count: int) -> Array:
        return self._index.new_ids(count)

    def save(self, env_ids: Array) -> Array:
        slots_of = self._vec.slots_of(env_ids)
        homes = self._homes_at(slots_of)
        ids = self.new_ids(len(env_ids))
        self._index.home[ids] = homes  # in advance: when this raises, some may be there
        try:
            table = StateReplies(self._simulator, len(ids), obs=False)
            self._place(clp.Op.SAVE, homes, slots_of.slots, ids, table, table.miss)
            if table.failed.any():
                raise EnvFailed(f"A state was not saved: {table.message}.")
        except BaseException:
            self.drop(ids)
            raise
        self._index.home[ids[table.lost]] = LOST
        self._index.put(ids, slots_of.to_play, slots_of.obs)
        return ids

    def load(self, ids: Array, env_ids: Array) -> Views:
        """Put these environments into these states, which must be in the environments' simulators."""
        slots_of = self._vec.slots_of(env_ids)
        homes = self._homes_at(slots_of)
        if (homes == LOST).any():
            raise EnvFailed("Some of these environments have lost their simulator; their episodes are over.")
        if (homes != self._index.homes_of(ids)).any():
            raise UserError("A state can be loaded only into the simulator that holds it: load it where it was saved.")
        table = StateReplies(self._simulator, len(ids))
        self._place(clp.Op.LOAD, homes, slots_of.slots, ids, table, None, flags=clp.WANT_OBS)
        if table.failed.any():
            raise EnvFailed(f"A state was not loaded: {table.message}.")
        self._vec.note_moved(env_ids, table.leaves, table.to_play)
        return self.look(ids)

    def look(self, ids: Array) -> Views:
        """Observations of states, from the copies kept here."""
        index = self._index
        index.homes_of(ids)
        obs = [leaf[ids] for leaf in index.obs]
        return Views(self.spec.observation.unflatten(obs), self._legal(obs), index.turn[ids])

    def drop(self, ids: Array) -> None:
        ids, homes = self._index.release(ids)
        for home in np.unique(homes[homes > LOST]).tolist():
            session = self._homes[home]
            if session.lost is None:
                mine = ids[homes == home] | self._bases[home]
                with self._fleet.lock:
                    session.send_one_way(clp.Op.DROP, [u8(mine)], len(mine))

    def expand(self, parents: Array, actions: Tree, children: Array, seeds: Array | None = None) -> Expansion:
        """One EXPAND to each simulator, all at once. When it raises, the children are dropped."""
        index = self._index
        try:
            leaves = self.spec.action.batch(actions, len(parents))
            index.require_given(children)
            homes, turn = index.homes_of(parents), index.turn[parents]
            self._detect_randomness(parents, leaves)
            index.home[children] = homes  # a child may replace a parent
            table = self._expand(parents, homes, leaves, children, seeds)
            faulty = self._failed(table, parents)
        except BaseException:
            self.drop(children)
            raise
        index.put(children, table.to_play, table.leaves)
        reward = table.reward[:, 0]
        if self.players > 1:
            reward = table.reward[np.arange(len(parents)), turn]
        obs = self.spec.observation.unflatten(table.leaves)
        ended = table.terminated, table.truncated
        return Expansion(children, obs, reward, *ended, self._legal(table.leaves), table.to_play, faulty)

    def rollout(self, parents: Array, actions: Tree, seeds: Array | None = None) -> Rollouts:
        """ROLLOUT to each simulator; with two players, or where steps are reseeded, the first steps use EXPAND."""
        leaves: list[Array] = self.spec.action.flatten(actions)
        count, steps = leaves[0].shape[:2]
        flat = tree_map(lambda leaf: leaf.reshape(count * steps, *leaf.shape[2:]), actions)
        leaves = [leaf.reshape(count, steps, *leaf.shape[1:]) for leaf in self.spec.action.batch(flat, count * steps)]
        self._detect_randomness(parents, [leaf[:, 0] for leaf in leaves])
        reseeded = seeds is not None and self.stochastic
        before = steps if self.players > 1 else int(reseeded)
        ids = parents.copy()
        try:
            found = self._step_by_step(ids, leaves, seeds, before)
            live = np.flatnonzero(~(found.terminated | found.truncated))
            if before < steps and len(live):
                self._roll(found, live, ids[live], [leaf[:, before:] for leaf in leaves])
        finally:
            self.drop(ids[ids != parents])
        return found

    def close(self) -> None:
        with self._fleet.lock:
            for session, base in zip(self._homes, self._bases.tolist(), strict=True):
                if self._fleet.sessions.get(session.number) is session:
                    session.send_one_way(clp.Op.DROP, meta={"generation": base >> clp.GENERATION_BITS})
        self._homes.clear()

    def _homes_at(self, slots_of: EnvSlots) -> Array:
        numbers = np.array([self._home_of(session) for session in slots_of.sessions] or [LOST], np.int16)
        return np.where(slots_of.lost, np.int16(LOST), numbers[slots_of.which])

    def _place(
        self, op: int, homes: Array, slots: Array, ids: Array, table: StateReplies, miss: Miss | None, flags: int = 0
    ) -> None:
        chunks = self._split(homes, table)
        remote = ids | self._bases[homes] if len(self._bases) else ids
        payloads: list[tuple[RowChunk, list[Buffer]]] = [
            (chunk, [slots[chunk.rows].tobytes(), u8(remote[chunk.rows])]) for chunk in chunks
        ]
        ask(self._fleet, op, payloads, table.take_steps, self._timeout_s, miss=miss, flags=flags)

    def _split(self, homes: Array, table: StateReplies, steps: int = 1) -> list[RowChunk]:
        """The rows of a call as requests; those of simulators that disconnected are missing."""
        chunks, gone = split(homes, self._homes, lambda session: _max_rows(session, steps))
        for rows in gone:
            table.miss(rows, "the simulator that kept these states disconnected")
        return chunks

    def _failed(self, table: StateReplies, parents: Array) -> Array | None:
        """Rows that failed, turned into failed steps; None if none did."""
        faulty = self._failed_steps.note(table.failed, table.message)
        if table.lost.any():  # which the environments' own supervision counts
            faulty = table.failed | table.lost
        if faulty is not None:
            table.reward[faulty], table.flags[faulty] = 0.0, clp.TRUNCATED
            table.to_play[faulty] = self._index.turn[parents[faulty]]
            for leaf, seen in zip(table.leaves, self._index.obs, strict=True):
                leaf[faulty] = seen[parents[faulty]]
        return faulty

    def _expand(
        self, parents: Array, homes: Array, leaves: list[Array], children: Array, seeds: Array | None
    ) -> StateReplies:
        """Children of 0 are not kept."""
        bases = self._bases[homes]
        remote, kept = parents | bases, np.where(children > 0, children | bases, 0)
        table, payloads = StateReplies(self._simulator, len(parents)), []
        for chunk in self._split(homes, table):
            simulator, rows = chunk.session.simulator, chunk.rows
            actions = simulator.action.write([leaf[rows] for leaf in leaves], chunk.count)
            payload: list[Buffer] = [u8(remote[rows]), actions, u8(kept[rows])]
            if seeds is not None and "reseed" in simulator.hello.capabilities:
                payload.append(u8(seeds[rows]))
            payloads.append((chunk, payload))
        ask(self._fleet, clp.Op.EXPAND, payloads, table.take_steps, self._timeout_s, miss=table.miss)
        return table

    def _roll(self, found: Rollouts, rows: Array, ids: Array, leaves: list[Array]) -> None:
        """Continue from these states, which are these rows of what has been found so far."""
        steps = leaves[0].shape[1]
        before = found.reward.shape[1] - steps
        homes = self._index.homes_of(ids)
        remote = ids | self._bases[homes]
        table, payloads = StateReplies(self._simulator, len(ids)), []
        for chunk in self._split(homes, table, steps):
            group, cut = chunk.session.simulator.action, [leaf[rows[chunk.rows]] for leaf in leaves]
            count = chunk.count * steps
            flat = [leaf.reshape(count, *leaf.shape[2:]) for leaf in cut]
            payloads.append((chunk, [u8(remote[chunk.rows]), group.write(flat, count)]))

        def take(chunk: RowChunk, reply: Message) -> None:
            table.take_steps(chunk, reply, at=2)
            reward, length = read_rollout(reply, chunk.count, steps)
            if not np.isfinite(reward).all():
                raise BadMessage("rewards of a rollout that are not finite")
            found.reward[rows[chunk.rows], before:] = reward
            found.length[rows[chunk.rows]] = before + np.minimum(length, steps)

        ask(self._fleet, clp.Op.ROLLOUT, payloads, take, self._timeout_s, miss=table.miss, meta={"steps": steps})
        faulty = self._failed(table, ids)
        if faulty is not None:
            found.faulty = np.zeros(len(found.length), np.bool_) if found.faulty is None else found.faulty
            found.faulty[rows] |= faulty
        found.terminated[rows], found.truncated[rows] = table.terminated, table.truncated
        for place, leaf in zip(self.spec.observation.flatten(found.obs), table.leaves, strict=True):
            place[rows] = leaf

    def _step_by_step(self, ids: Array, leaves: list[Array], seeds: Array | None, before: int) -> Rollouts:
        """Make the first steps one by one; `ids` are then the states to continue from."""
        count, steps = leaves[0].shape[:2]
        last_obs = [np.zeros((count, *leaf.shape), leaf.dtype) for leaf in self.spec.observation.leaves]
        ended = np.zeros((2, count), np.bool_)
        found = Rollouts(
            np.zeros((count, steps)), np.zeros(count, np.int64), self.spec.observation.unflatten(last_obs), *ended
        )
        rows = np.arange(count)
        for t in range(before):
            action = self.spec.action.unflatten([leaf[rows, t] for leaf in leaves])
            chance = None if seeds is None or t else seeds
            made = self.expand(ids[rows], action, self.new_ids(len(rows)), chance)
            if t:
                self.drop(ids[rows])
            ids[rows] = made.children
            found.reward[rows, t] = made.reward
            found.length[rows] += 1
            found.terminated[rows], found.truncated[rows] = made.terminated, made.truncated
            if made.faulty is not None:
                found.faulty = np.zeros(count, np.bool_) if found.faulty is None else found.faulty
                found.faulty[rows], found.length[rows[made.faulty]] = made.faulty, t
            for place, leaf in zip(last_obs, self.spec.observation.flatten(made.obs), strict=True):
                place[rows] = leaf
            rows = rows[~(made.terminated | made.truncated)]
            if not len(rows):
                break
        return found

    def _detect_randomness(self, parents: Array, leaves: list[Array]) -> None:
        """From time to time, make some steps twice without keeping them: if they differ, steps are random."""
        self._calls += 1
        if self.stochastic or (self._calls > _FIRST_CALLS and self._calls % _EVERY_CALLS):
            return
        capabilities = self._simulator.hello.capabilities
        if "rng_in_state" in capabilities and "reseed" not in capabilities:
            return
        some = np.arange(min(_SOME, len(parents)))
        twice = np.concatenate([some, some])
        seeds = self._probes.integers(1, 2**63, len(twice), np.uint64)
        homes, no_slots = self._index.homes_of(parents[twice]), np.zeros(len(twice), np.int64)
        table = self._expand(parents[twice], homes, [leaf[twice] for leaf in leaves], no_slots, seeds)
        outcomes = table.outcomes()
        self.stochastic = outcomes[: len(some)] != outcomes[len(some) :]

    def _look_for_foreseen(self, session: SimulatorSession) -> None:
        """Without chance seeds, random numbers in states are foreseen; that is noticed if two slots are free."""
        client, slots = StateClient(self._fleet, session, self._timeout_s), list[int]()
        try:
            with self._fleet.lock:
                slots += [session.take_slot() for _ in range(2) if session.room > 0]
            if len(slots) < 2 or not foresees(client, np.array(slots)):
                return
            self.foreseen = (
                f"A planner foresees what {self.spec.name} does not show: its steps depend on the seed of RESET, and "
                "EXPAND takes no other; write reseed(uint64_t) (sdk/cpp/README.md)."
            )
            warn_once(self.foreseen)
        except (EnvFailed, UserError) as error:
            log.info("It is not known whether a planner foresees random numbers of %s: %s", self.spec.name, error)
        finally:
            with self._fleet.lock:
                for slot in slots:
                    session.free_slot(slot)
                if session.lost is None:
                    client.next_generation()

    def _home_of(self, session: SimulatorSession) -> int:
        """Its index here; UserError when it keeps no states."""
        if session in self._homes:
            return self._homes.index(session)
        if session.simulator.hello.level == Level.NONE:
            raise UserError(
                f"A search saves and restores environments, which {session.name} does not support: make its "
                "environment copyable, or implement save() and load() (sdk/cpp/README.md)."
            )
        gone = [k for k, home in enumerate(self._homes) if home.lost is not None]
        if gone:
            self._index.home[self._index.home == gone[0]] = LOST
            self._homes[gone[0]] = session
        else:
            self._homes.append(session)
            self._bases = np.append(self._bases, 0)
        home = self._homes.index(session)
        self._bases[home] = session.take_generation() << clp.GENERATION_BITS
        return home

    def _find_mask(self) -> int | None:
        """The leaf of observations that is the action mask, if there is one (docs/link.md)."""
        paths = [leaf.path for leaf in self.spec.observation.leaves]
        if (_MASK,) not in paths or not isinstance(self.spec.action_space, Discrete):
            return None
        leaf, count = self.spec.observation.leaves[paths.index((_MASK,))], int(self.spec.action_space.n)
        if leaf.shape != (count,):
            raise UserError(
                f"{self.spec.name} has {count} actions and an action_mask of shape {leaf.shape}: give the mask one "
                "number for each action."
            )
        return paths.index((_MASK,))

    def _legal(self, obs: list[Array]) -> Array | None:
        return None if self._mask is None else obs[self._mask] != 0


def _max_rows(session: SimulatorSession, steps: int = 1) -> int:
    if steps == 1:
        return session.max_rows
    simulator = session.simulator
    return rows_per_message(session.limits, simulator.row_bytes + steps * (simulator.action.row_bytes + 8))
