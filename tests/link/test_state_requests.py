"""States over the link: save, load, expand, rollout, drop, export and import, in the orders that break simulators."""

from functools import partial

import gymnasium
import numpy as np
import psutil
import pytest
from helpers.declared_walk import Declared
from helpers.sims import Sim, free_url
from helpers.state_rollout import rollout

import corral
from corral.core.errors import EnvFailed
from corral.link import protocol as clp
from corral.link.client.states import StateClient

KINDS = {"copies": "CartPole-v1", "whole": partial(Declared, True), "key": partial(Declared, False)}


def build(kind):
    from corral.envs.resolve import resolve

    return resolve(KINDS[kind]).factory()


@pytest.fixture(params=KINDS)
def states(request):
    url = free_url()
    sim = Sim(partial(build, request.param), url)
    with corral.make_vec(url, 1) as vec:
        (session,) = vec.fleet.sessions.values()
        yield StateClient(vec.fleet, session, 20.0)
    sim.end()


def walk(states, slots, seed, count):
    """Observations, rewards and flags of a walk."""
    space, seen = states.session.simulator.spec.action_space, []
    space.seed(seed)
    for _ in range(count):
        rows = states.step(slots, np.array([space.sample() for _ in slots]), autoreset=True)
        rows.require_good("step")
        seen.append((rows.obs.copy(), rows.reward.copy(), rows.terminated.copy(), rows.truncated.copy()))
    return seen


def same(a, b):
    for left, right in zip(a, b, strict=True):
        for x, y in zip(left, right, strict=True):
            np.testing.assert_array_equal(x, y)


def test_steps_after_load_equal_steps_after_save(states):
    slots = states.take_slots(2)
    states.reset(slots, np.array([1, 2])).require_good("reset")
    walk(states, slots, 0, 3)
    ids, rows = states.save(slots)
    rows.require_good("save")
    first = walk(states, slots, 7, 6)
    loaded = states.load(slots, ids)
    loaded.require_good("load")
    same(walk(states, slots, 7, 6), first)
    states.reset(slots, np.array([8, 9]))  # after a reset, into each other's slots, and again
    states.load(slots[::-1], ids).require_good("load")
    same([tuple(x[::-1] for x in step) for step in walk_back(states, slots, 7, 6)], first)


def walk_back(states, slots, seed, count):
    """The same walk with the slots in reverse order."""
    space, seen = states.session.simulator.spec.action_space, []
    space.seed(seed)
    for _ in range(count):
        actions = np.array([space.sample() for _ in slots])
        rows = states.step(slots, actions[::-1].copy(), autoreset=True)
        seen.append((rows.obs.copy(), rows.reward.copy(), rows.terminated.copy(), rows.truncated.copy()))
    return seen


def test_a_load_shows_the_observation_of_the_save(states):
    slots = states.take_slots(1)
    states.reset(slots, np.array([5]))
    last = walk(states, slots, 1, 4)[-1][0]
    ids, _ = states.save(slots)
    walk(states, slots, 2, 5)
    np.testing.assert_array_equal(states.load(slots, ids).obs, last)


def test_expanding_is_load_step_save_and_leaves_the_slots_alone(states):
    slots = states.take_slots(2)
    states.reset(slots, np.array([3, 4]))
    walk(states, slots, 0, 2)
    ids, _ = states.save(slots)
    actions = np.array([1, 0, 1, 1])
    children, expanded = states.expand(ids[[0, 0, 1, 1]], actions)
    expanded.require_good("expand")
    for row in range(4):
        states.load(slots[:1], ids[[0, 0, 1, 1]][row : row + 1])
        stepped = states.step(slots[:1], actions[row : row + 1], autoreset=True)
        np.testing.assert_array_equal(stepped.obs[0], expanded.obs[row])
        np.testing.assert_array_equal(stepped.reward[0], expanded.reward[row])
        deeper = states.expand(children[row : row + 1], np.array([0]))[1]
        np.testing.assert_array_equal(states.step(slots[:1], np.array([0]), autoreset=True).obs, deeper.obs)


def test_a_rollout_is_its_steps_and_stops_at_the_end(states):
    slots = states.take_slots(1)
    states.reset(slots, np.array([3]))
    ids, _ = states.save(slots)
    actions = np.zeros(40, np.int64)
    rewards, lengths, last = rollout(states, ids, actions, 40)
    assert 5 <= lengths[0] < 40
    assert (rewards[0, lengths[0] :] == 0).all()
    assert last.terminated[0]
    parent = ids
    for k in range(lengths[0]):
        parent, rows = states.expand(parent, np.array([0]))
        assert rows.reward[0, 0] == rewards[0, k]
    np.testing.assert_array_equal(rows.obs, last.obs)
    assert states.expand(parent, np.array([0]))[1].status[0] == clp.Status.E_NO_EPISODE


def test_unknown_states_are_errors_of_their_rows(states):
    slots = states.take_slots(2)
    states.reset(slots, np.array([1, 2]))
    ids, _ = states.save(slots)
    states.drop(ids[:1])
    rows = states.load(slots, ids)
    assert rows.status.tolist() == [clp.Status.E_UNKNOWN_STATE, 0]
    with pytest.raises(EnvFailed, match="row 0 of 2: E_UNKNOWN_STATE"):
        rows.require_good("load")
    states.next_generation()
    assert (states.load(slots, ids).status == clp.Status.E_UNKNOWN_STATE).all()


def test_exported_states_continue_in_another_simulator(states):
    if states.level < 4:
        slots = states.take_slots(1)
        states.reset(slots, np.array([1]))
        ids, _ = states.save(slots)
        assert states.export(ids)[1].status[0] == clp.Status.E_UNSUPPORTED
        return
    slots = states.take_slots(2)
    states.reset(slots, np.array([1, 2]))
    walk(states, slots, 0, 3)
    ids, _ = states.save(slots)
    blobs, rows = states.export(ids)
    rows.require_good("export")
    expected = states.expand(ids, np.array([2, 1]))[1]
    url = free_url()
    whole = "key_state" not in states.session.simulator.hello.capabilities
    sim = Sim(partial(build, "whole" if whole else "key"), url)
    with corral.make_vec(url, 1) as vec:
        (session,) = vec.fleet.sessions.values()
        other = StateClient(vec.fleet, session, 20.0)
        copies, rows = other.import_states(blobs)
        rows.require_good("import")
        np.testing.assert_array_equal(other.expand(copies, np.array([2, 1]))[1].obs, expected.obs)
        for bad in (b"", b"CPY1", blobs[0][:-1], bytes([blobs[0][0] ^ 1]) + blobs[0][1:], blobs[0] + b"\0"):
            assert other.import_states([bad])[1].status[0] == clp.Status.E_BAD_REQUEST
    sim.end()


def test_state_memory_is_bounded_without_eviction(states):
    slots = states.take_slots(1)
    states.reset(slots, np.array([1]))
    ids, _ = states.save(slots)
    one = states.stats()["snapshot_bytes"]
    for _ in range(9):
        states.save(slots)
    assert states.stats()["snapshots"] == 10
    assert states.stats()["snapshot_bytes"] == pytest.approx(10 * one, rel=0.2)
    states.save(slots, ids)  # the same id again takes no more room
    assert states.stats()["snapshots"] == 10
    states.next_generation()
    stats = states.stats()
    assert (stats["snapshots"], stats["snapshot_bytes"]) == (0, 0)


def test_a_budget_that_is_spent_is_an_error_of_the_row(states):
    from corral.core.gym_env import build_env
    from corral.envs.serve.slots import STATUS, Slots
    from corral.link.control import Budget
    from corral.snapshot.keepers.choose import find_keeper

    factory = partial(gymnasium.make, "CartPole-v1")
    spec = build_env(factory, "CartPole-v1")[1]
    slots = Slots(factory, "CartPole-v1", spec, 1, find_keeper(factory), Budget(bytes=1 << 30, count=3))
    slots.reset(1, [bytes(4), bytes(8)])

    def status(reply):
        return slots._table.read(reply.payload[0], 1)[STATUS][0]

    def save(key):
        return status(slots.save(1, [bytes(4), key.to_bytes(8, "little")]))

    def load(key):
        return status(slots.load(1, [bytes(4), key.to_bytes(8, "little")], False))

    assert [save(key) for key in (1, 2, 3, 4, 2)] == [0, 0, 0, clp.Status.E_SNAPSHOT_FULL, 0]
    assert [load(key) for key in (1, 2, 3, 4)] == [0, 0, 0, clp.Status.E_UNKNOWN_STATE]


def test_many_saves_and_drops_leave_memory_flat(states):
    process = psutil.Process(_pid(states))
    slots = states.take_slots(1)
    states.reset(slots, np.array([1]))
    for k in range(600):
        states.drop(states.save(slots)[0])
        if k == 200:
            before = process.memory_info().rss
    assert states.stats()["snapshots"] == 0
    assert process.memory_info().rss - before < 4e6


def _pid(states):
    return next(
        p.pid for p in psutil.Process().children(recursive=True)
        if any(c.raddr and f":{c.raddr.port}" in states._fleet.binding.urls[0] for c in p.net_connections("tcp"))
    )  # fmt: skip
