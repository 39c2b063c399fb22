"""Searches over states inside C++ and Python simulators: what they find, what they cost, and what they leave alone."""

import os
import signal
import subprocess

import numpy as np
import pytest
from helpers.declared_walk import Declared, Undeclared
from helpers.sims import Sim, free_url

import corral
from corral.core.errors import EnvFailed, UserError
from corral.envs.backends.simulators.states import LinkStates
from corral.envs.suites.games.connect4 import CONNECT4
from corral.envs.supervision import Supervision
from corral.link import protocol as clp
from corral.planning.mcts.evaluation import uniform_evaluation
from corral.planning.mcts.search import TreeSearch
from corral.planning.mcts.selection import Puct
from corral.snapshot.states import Level, warn_once

FEW = {"step_timeout_s": 20.0, "start_timeout_s": 30.0}


@pytest.fixture
def make(built):
    """VecEnvs over C++ examples, closed with the test."""
    made = []

    def go(example, num_envs, sims=1, options="", **kwargs):
        kwargs = {"sim": f"{built / example} --connect {{url}} {options}", "sims": sims, **kwargs}
        vec = corral.make_vec("tcp://127.0.0.1:0", num_envs, workers=sims, env_kwargs=kwargs, seed=3,
                              supervision=Supervision(**FEW))  # fmt: skip
        made.append(vec)
        return vec

    yield go
    for vec in made:
        vec.close()


@pytest.fixture(params=[Undeclared, Declared])
def walk(request):
    """A VecEnv over a Python simulator of a walk that throws dice."""
    url = free_url()
    sim = Sim(request.param, url)
    with corral.make_vec(url, 3, seed=1) as vec:
        vec.recv()
        yield vec
    sim.end()


def stats(vec):
    """How many states the simulators keep."""
    from corral.link.client.states import StateClient

    return sum(StateClient(vec.fleet, session).stats()["snapshots"] for session in vec.fleet.sessions.values())


def moves(legal, rng):
    return np.argmax(legal * rng.random(legal.shape), axis=1)


def play(vec, steps, between=lambda batch: None):
    """What comes of random legal moves."""
    rng, seen = np.random.default_rng(7), []
    batch = vec.recv()
    for _ in range(steps):
        between(batch)
        vec.send(batch.env_ids, moves(batch.obs["action_mask"], rng))
        batch = vec.recv()
        assert not batch.faulty.any()
        ends = batch.terminated.copy(), batch.truncated.copy()
        seen.append((batch.obs["stones"].copy(), batch.next_obs["stones"].copy(), batch.reward.copy(), *ends))
    return seen


def same(a, b):
    for left, right in zip(a, b, strict=True):
        for x, y in zip(left, right, strict=True):
            np.testing.assert_array_equal(x, y)


def searcher(states, trees, sims, leaves=4):
    return TreeSearch(states, uniform_evaluation, trees, 7, sims, leaves)


def test_search_in_cpp_simulators_equals_in_process(make):
    vec = make("connect4", 6, sims=2)
    states, here = vec.states(), CONNECT4.states()
    assert isinstance(states, LinkStates)
    assert (states.level, states.players) == (Level.PORTABLE, 2)
    boards, rng, batch = CONNECT4.start(6), np.random.default_rng(0), vec.recv()
    remote, local = searcher(states, 6, 60), searcher(here, 6, 60)
    for _ in range(6):
        roots = states.save(batch.env_ids)
        assert states.look(roots).legal.tolist() == CONNECT4.look(boards)[1].tolist()
        found, expected = remote.run(roots, Puct()), local.run(here.put(boards), Puct())
        np.testing.assert_array_equal(found.n, expected.n)
        np.testing.assert_array_equal(found.total, expected.total)
        assert not found.n[:, 0][batch.obs["action_mask"] == 0].any()
        chosen = moves(batch.obs["action_mask"], rng)
        vec.send(batch.env_ids, chosen)
        batch = vec.recv()
        _, over = CONNECT4.move(boards, chosen)
        boards[over] = CONNECT4.start(int(over.sum()))
    assert not states.stochastic


@pytest.mark.parametrize("threads", [1, 3])
def test_planning_does_not_change_episodes(make, threads):
    options = f"--threads {threads}"
    alone = play(make("connect4", 5, 2, options), 60)
    vec = make("connect4", 5, 2, options)
    states = vec.states()
    search = searcher(states, 5, 40)
    same(play(vec, 60, lambda batch: search.run(states.save(batch.env_ids), Puct())), alone)
    assert any(step[3].any() for step in alone)


def test_wave_is_one_message_per_simulator(make):
    vec = make("connect4", 8, 2)
    vec.recv()
    states = vec.states()
    search = searcher(states, 8, 40)
    asked = []
    for session in vec.fleet.sessions.values():
        submit = session.submit
        session.submit = lambda op, *a, submit=submit, **k: asked.append(op) or submit(op, *a, **k)
    search.run(states.save(np.arange(8)), Puct())
    assert asked.count(clp.Op.EXPAND) == 2 * search.waves
    assert asked.count(clp.Op.SAVE) == 2
    assert stats(vec) == search.forest.size.sum()
    search.clear(np.arange(8))
    assert stats(vec) == 0
    states.save(np.arange(8))
    states.close()
    assert stats(vec) == 0


def test_two_planners_on_the_same_simulators_do_not_meet(make):
    vec = make("connect4", 2)
    vec.recv()
    one, other = vec.states(), vec.states()
    env = np.array([0])
    mine, theirs = one.save(env), other.save(env)
    for _ in range(3):
        mine = one.expand(mine, np.array([2]), one.new_ids(1)).children
        theirs = other.expand(theirs, np.array([5]), other.new_ids(1)).children
    assert one.look(mine).obs["stones"].sum(axis=(0, 1, 2)).tolist() == [0, 0, 3, 0, 0, 0, 0]
    assert other.look(theirs).obs["stones"].sum(axis=(0, 1, 2)).tolist() == [0, 0, 0, 0, 0, 3, 0]
    one.close()
    assert not other.expand(theirs, np.array([5]), other.new_ids(1)).terminated[0]


def test_rewards_are_of_the_acting_player(make):
    vec = make("connect4", 1)
    vec.recv()
    states = vec.states()
    here, turns = states.save(np.array([0])), []
    for move in (0, 1, 0, 1, 0, 1):
        steps = states.expand(here, np.array([move]), states.new_ids(1))
        here = steps.children
        turns.append(int(steps.to_play[0]))
    assert turns == [1, 0, 1, 0, 1, 0]
    won = states.expand(here, np.array([0]), states.new_ids(1))
    assert (won.reward[0], won.terminated[0]) == (1.0, True)
    passed = states.expand(here, np.array([2]), states.new_ids(1)).children
    lost_by = states.expand(passed, np.array([1]), states.new_ids(1))
    assert (lost_by.reward[0], lost_by.terminated[0]) == (1.0, True)
    with pytest.raises(EnvFailed, match="has ended"):
        states.expand(won.children, np.array([0]), states.new_ids(1))
    rolled = states.rollout(here, np.array([[2, 1, 3]]))
    assert (rolled.reward.tolist(), rolled.length.tolist()) == ([[0, 1, 0]], [2])
    assert rolled.terminated[0]


def test_more_rows_than_a_message_takes_are_several_messages(make):
    vec = make("cartpole", 4, 2)
    vec.recv()
    states = vec.states()
    parents = np.repeat(states.save(np.arange(4)), 3000)
    actions = np.tile([0, 1], 6000)
    steps = states.expand(parents, actions, states.new_ids(12_000))
    few = states.expand(parents[:1], actions[:1], states.new_ids(1))
    np.testing.assert_array_equal(steps.obs[:3000:2], np.repeat(few.obs, 1500, axis=0))
    np.testing.assert_array_equal(steps.obs, states.look(steps.children).obs)
    assert steps.legal is None


def test_a_rollout_is_the_steps_one_by_one(make):
    vec = make("cartpole", 2, 2)
    vec.recv()
    states = vec.states()
    parents = states.save(np.array([0, 1]))
    actions = np.stack([np.tile([0, 1], 20), np.ones(40, np.int64)])
    found = states.rollout(parents, actions)
    assert found.length[1] < 40  # always to the right: it falls
    for row in range(2):
        here, length = parents[row : row + 1], int(found.length[row])
        for t in range(length):
            steps = states.expand(here, actions[row : row + 1, t], states.new_ids(1))
            here = steps.children
            assert steps.reward[0] == found.reward[row, t]
        np.testing.assert_array_equal(steps.obs[0], found.obs[row])
        assert (steps.terminated[0], steps.truncated[0]) == (found.terminated[row], found.truncated[row])
        assert not found.reward[row, length:].any()


def test_an_environment_can_be_put_back(make):
    vec = make("connect4", 2)
    batch = vec.recv()
    states = vec.states()
    ids = states.save(batch.env_ids)
    seen = []
    for _ in range(2):
        views = states.load(ids, batch.env_ids)
        obs, rewards = views.obs, []
        assert not obs["stones"].any()
        for t in range(9):
            vec.send(batch.env_ids, np.array([t % 2, 3 + t % 2]))
            batch = vec.recv()
            rewards.append(batch.reward.tolist())
        seen.append(rewards)
    assert seen[0] == seen[1]


def test_rng_is_the_parents_unless_seeded(walk):
    states = walk.states()
    parents, actions = states.save(np.arange(3)), np.zeros(3, np.int64)
    real = states.expand(parents, actions, states.new_ids(3))
    assert states.stochastic
    again = states.expand(parents, actions, states.new_ids(3))
    np.testing.assert_array_equal(real.obs, again.obs)
    seeds = np.arange(1, 4, dtype=np.uint64)
    other = states.expand(parents, actions, states.new_ids(3), seeds)
    assert (other.obs[:, 0] != real.obs[:, 0]).all()
    rolled = states.rollout(parents, np.zeros((3, 12), np.int64))
    assert rolled.reward[:, 0].tolist() == real.reward.tolist()
    elsewhere = states.rollout(parents, np.zeros((3, 12), np.int64), seeds)
    assert elsewhere.reward[:, 0].tolist() == other.reward.tolist()
    assert (elsewhere.reward[:, 1:] != rolled.reward[:, 1:]).all()
    assert elsewhere.length.tolist() == [12, 12, 12]
    assert elsewhere.terminated.all()
    kept = stats(walk)
    states.drop(np.concatenate([parents, real.children, again.children, other.children]))
    assert (kept, stats(walk)) == (12, 0)
    walk.send(np.arange(3), actions)
    np.testing.assert_array_equal(walk.recv().obs, real.obs)


def test_foreseen_dice_of_a_simulator_are_said_once(make, caplog):
    """Its dice are in its states and cannot be reseeded: a search wins always, where 0.2 is to be had."""
    warn_once.cache_clear()
    vec = make("guess", 4)
    search = corral.Search(vec, lambda obs: (np.zeros((len(obs), 5)), np.zeros(len(obs))), sims=16, discount=0.5)
    with corral.Sampler(vec, search) as sampler:
        assert next(sampler.rollouts(19)).reward.mean() > 0.9
    for name in ("connect4", "guess", "pendulum"):
        make(name, 2).states()
    told = [record.getMessage() for record in caplog.records if "foresees" in record.getMessage()]
    assert len(told) == 1
    assert "A planner foresees what Guess does not show" in told[0]
    assert "write reseed(uint64_t)" in told[0]
    assert vec.states().foreseen == told[0]
    full = make("guess", 4, options="--envs 5").states()  # one free slot is too few to tell
    assert full.foreseen == ""


def test_full_simulator_names_remedy_and_recovers(make):
    vec = make("connect4", 1, snapshot_mb=0)
    vec.recv()
    with pytest.raises(UserError, match="snapshot_mb"):
        vec.states().save(np.array([0]))
    vec = make("connect4", 1, snapshot_mb=1)
    vec.recv()
    states = vec.states()
    root = states.save(np.array([0]))
    parents, actions = np.repeat(root, 5000), np.zeros(5000, np.int64)
    kept = states.expand(parents, actions, states.new_ids(5000)).children
    with pytest.raises(UserError, match=r"fewer simulations or trees.*snapshot_mb"):
        states.expand(parents, actions, states.new_ids(5000))
    assert stats(vec) == 1 + 5000
    states.drop(kept)
    states.expand(parents, actions, states.new_ids(5000))


def test_observation_memory_is_bounded(make):
    vec = make("cartpole", 1)
    vec.recv()
    states = vec.states(memory_mb=0.5)
    root = states.save(np.array([0]))
    states.expand(np.repeat(root, 9000), np.zeros(9000, np.int64), states.new_ids(9000))
    with pytest.raises(UserError, match=r"keeps 9,001 states.*memory_mb"):
        states.new_ids(9000)


def test_lost_simulator_fails_only_its_searches(make, built):
    url = free_url()
    running = [subprocess.Popen([built / "connect4", "--connect", url]) for _ in range(2)]
    try:
        with corral.make_vec(url, 4, workers=2, supervision=Supervision(**FEW)) as vec:
            seen = vec.recv().obs
            states = LinkStates(vec, timeout_s=0.5)
            search = searcher(states, 4, 50)
            whole = search.run(states.save(np.arange(4)), Puct()).n[:4, 0].copy()
            roots = states.save(np.arange(4))
            os.kill(running[0].pid, signal.SIGSTOP)
            forest = search.run(roots, Puct())
            assert forest.visits[:4, 0].tolist() == [51] * 4
            running[0].kill()
            roots = states.save(np.arange(4))
            steps = states.expand(roots, np.zeros(4, np.int64), states.new_ids(4))
            assert steps.faulty.sum() == 2
            np.testing.assert_array_equal(steps.obs["stones"][steps.faulty], seen["stones"][steps.faulty])
            np.testing.assert_array_equal(steps.truncated, steps.faulty)
            np.testing.assert_array_equal(forest.n[:4, 0][~steps.faulty], whole[~steps.faulty])
            assert not steps.reward[steps.faulty].any()
            rolled = states.rollout(roots, np.zeros((4, 3), np.int64))
            np.testing.assert_array_equal(rolled.faulty, steps.faulty)
            with pytest.raises(EnvFailed, match="lost their simulator"):
                states.load(roots, np.arange(4))
            vec.send(np.arange(4), np.zeros(4, np.int64))
            np.testing.assert_array_equal(vec.recv().faulty, steps.faulty)
            assert search.run(states.save(np.arange(4)), Puct()).visits[:4, 0].tolist() == [51] * 4
            assert states.expand(states.save(np.arange(4)), np.zeros(4, np.int64), states.new_ids(4)).faulty is None
    finally:
        for process in running:
            process.kill()
            process.wait()


def test_environments_that_are_under_way_have_no_known_state(make):
    vec = make("connect4", 2)
    vec.recv()
    states = vec.states()
    vec.send(np.array([1]), np.array([0]))
    assert len(states.save(np.array([0]))) == 1
    with pytest.raises(UserError, match=r"recv\(\)"):
        states.save(np.array([0, 1]))


def test_simulators_without_states_are_refused_with_the_remedy(make):
    vec = make("owned_loop", 1)
    vec.recv()
    with pytest.raises(UserError, match="copyable"):
        vec.states()


def test_unknown_ids_are_refused_but_for_drop(make):
    vec = make("cartpole", 1)
    vec.recv()
    states = vec.states()
    root, action = states.save(np.array([0])), np.array([1])
    child = states.expand(root, action, states.new_ids(1)).children
    states.drop(np.array([0, 12_345, root[0], root[0]]))
    assert stats(vec) == 1
    for ids in (root, np.array([12_345]), np.array([-4])):
        with pytest.raises(UserError, match="was dropped or never saved"):
            states.expand(ids, action, states.new_ids(1))
        with pytest.raises(UserError, match="was dropped or never saved"):
            states.look(ids)
    with pytest.raises(UserError, match="was dropped or never saved"):
        states.expand(child, action, root)
    given = [states.new_ids(1)[0] for _ in range(3000)]
    assert len({*given, child[0]}) == 3001


def test_snapshots_of_a_url_are_states_in_the_simulator(make):
    vec = make("cartpole", 1)
    with corral.Snapshots(vec, rng="replay") as snapshots:
        vec.recv()
        here = snapshots.save()
        steps = snapshots.expand([here, here], [0, 1])
        shown = snapshots.load(int(steps.children[1]))
        np.testing.assert_array_equal(shown, steps.obs[1])
        on = snapshots.expand(int(steps.children[1]), 0)
        vec.send(np.array([0]), np.array([0]))
        np.testing.assert_array_equal(vec.recv().obs, on.obs)
