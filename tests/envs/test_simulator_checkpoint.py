"""State of a VecEnv over the link: exported where the simulators can, new episodes elsewhere."""

import numpy as np
import pytest
from helpers.declared_walk import Declared, Undeclared
from helpers.sims import Sim, free_url

import corral


@pytest.fixture
def sims():
    running = []
    yield running
    for sim in running:
        sim.end()


def step(vec, rng):
    vec.send(np.arange(vec.num_envs), rng.integers(2, size=vec.num_envs))
    return vec.recv()


def test_restored_environments_continue_bit_for_bit(sims):
    url = free_url()
    sims += [Sim(Declared, url, slots=2), Sim(Declared, url, slots=2)]
    with corral.make_vec(url, 3, workers=2, seed=1) as vec:
        vec.recv()
        rng = np.random.default_rng(0)
        for _ in range(15):
            step(vec, rng)
        state = vec.state_dict()
        assert sorted(state["envs"]) == ["0", "1", "2"]
        expected = [step(vec, rng) for _ in range(60)]
    url = free_url()
    sims.append(Sim(Declared, url))
    with corral.make_vec(url, 3, seed=9) as vec:
        assert vec.load_state_dict(state) == []
        rng = np.random.default_rng(0)
        rng.integers(2, size=45)
        for batch in expected:
            actual = step(vec, rng)
            np.testing.assert_array_equal(actual.obs, batch.obs)
            np.testing.assert_array_equal(actual.terminated, batch.terminated)
    assert any(batch.terminated.any() for batch in expected)


def test_environments_without_exported_states_start_again(sims):
    url = free_url()
    sims.append(Sim(Undeclared, url))
    with corral.make_vec(url, 2, seed=1) as vec:
        vec.recv()
        rng = np.random.default_rng(0)
        for _ in range(5):
            step(vec, rng)
        state = vec.state_dict()
        assert state["envs"] == {}
    url = free_url()
    sims.append(Sim(Undeclared, url))
    with corral.make_vec(url, 2) as vec:
        assert vec.load_state_dict(state) == [0, 1]
        batch = vec.recv()
        assert batch.first.all()
        assert not step(vec, rng).faulty.any()


def test_resumed_run_continues_its_episodes(sims, tmp_path):
    url, run = free_url(), tmp_path / "run"
    sims.append(Sim(Declared, url))
    corral.train("ppo", url, 512, 0, run, quiet=True, num_envs=4, eval_episodes=0)
    sims.append(Sim(Declared, url))
    assert corral.resume(run, steps=1024, quiet=True).steps >= 1024
    assert "every environment continues its episode" in (run / "events.jsonl").read_text()
