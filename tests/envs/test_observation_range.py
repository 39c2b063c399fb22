"""Discrete observations outside their space: a faulty row instead of a network that fails."""

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from helpers.sims import Sim, free_url

import corral
from corral.core.errors import EnvFailed
from corral.core.spaces import Layout, Leaf
from corral.snapshot.array_states import ArrayStates
from corral.testing.play import play

NESTED = spaces.Dict(
    position=spaces.Box(-1, 1, (2,), np.float32),
    goal=spaces.Tuple([spaces.Discrete(3, start=1), spaces.MultiDiscrete([3, 4], start=[0, -1])]),
)
FLAT = np.zeros(2, np.float32)
CASES = {  # space, an observation inside, one outside, what the report says
    "discrete": (spaces.Discrete(5), 4, 5, "'value' is 5, outside its space Discrete(5)"),
    "negative": (spaces.Discrete(5), 0, -1, "'value' is -1, outside"),
    "with a start": (spaces.Discrete(5, start=-2), 2, 3, "'value' is 3, outside its space Discrete(5, start=-2)"),
    "multi-discrete": (spaces.MultiDiscrete([3, 4]), np.array([2, 3]), np.array([0, 4]), r"[0, 4], outside"),
    "multi-binary": (spaces.MultiBinary(3), np.ones(3, np.int8), np.array([0, 2, 0], np.int8), r"[0, 2], outside"),
    "nested": (
        NESTED,
        {"position": FLAT, "goal": (1, np.array([2, -1]))},
        {"position": FLAT, "goal": (1, np.array([2, -2]))},
        "'goal.1' has values in [-2, 2], outside",
    ),
}


class Strays(gymnasium.Env):
    """Its observation is outside in every third episode, at `where`: a step, the last step, or the reset after it."""

    action_space = spaces.Discrete(2)

    def __init__(self, case, where="step"):
        self.observation_space, self._good, self._bad, _ = CASES[case]
        self._where, self._episode = where, -1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._t, self._episode = 0, self._episode + 1
        return self._obs("reset" if seed is None else ""), {}

    def step(self, action):
        self._t += 1
        where = {2: "step", 4: "last"}.get(self._t, "")
        return self._obs(where), 1.0, self._t == 4, False, {}

    def _obs(self, where):
        return self._bad if where == self._where and self._episode % 3 == 2 else self._good


def inside(space, tree):
    layout = Layout(space)
    return layout.range_problem([np.asarray(leaf) for leaf in layout.flatten(tree)]) is None


@pytest.mark.parametrize("backend", ["local", "process"])
@pytest.mark.parametrize("case", CASES)
def test_discrete_obs_outside_its_space_is_a_faulty_row(case, backend):
    space, _, _, text = CASES[case]
    with corral.make_vec(lambda: Strays(case), 2, backend, workers=1) as vec:
        rows = play(vec, 24)
        faults = list(vec.faults)
    assert len(faults) >= 4
    assert all(fault.kind == "range" and fault.step == 2 and text in fault.detail for fault in faults)
    assert "outside its space" in str(faults[0])
    for row in (row for env in rows for row in env):
        assert inside(space, row.next_obs)
        assert inside(space, row.following)
    assert sum(row.faulty for env in rows for row in env) == len(faults)


@pytest.mark.parametrize("where", ["last", "reset"])
def test_obs_outside_its_space_at_an_episodes_end_is_a_fault(where):
    with corral.make_vec(lambda: Strays("discrete", where), 2, "local") as vec:
        rows, faults = play(vec, 40), list(vec.faults)
    assert faults
    assert {fault.kind for fault in faults} == {"range"}
    assert any(row.faulty for env in rows for row in env) == (where == "last")
    assert all(row.next_obs in range(5) and row.following in range(5) for env in rows for row in env)


def test_training_survives_an_obs_outside_its_space(tmp_path):
    result = corral.train(
        "ppo", env=lambda: Strays("nested"), steps=256, num_envs=4, backend="local", run_dir=tmp_path / "run"
    )  # fmt: skip
    assert result.eval_return == 4.0


def test_vector_env_with_an_obs_outside_its_space_fails_readably():
    venv = gymnasium.vector.SyncVectorEnv([lambda: Strays("discrete"), lambda: Strays("discrete")])
    vec = corral.make_vec(venv)
    with vec, pytest.raises(EnvFailed, match=r"Environments \[0, 1\].*is 5, outside its space Discrete\(5\)"):
        play(vec, 24)


class Edge(Strays):
    """Action 1 leads outside."""

    def step(self, action):
        return (self._bad if action else self._good), 1.0, False, False, {}


def unchecked():
    """An environment of an older simulator, which sends what it gets."""
    Leaf.is_discrete = property(lambda leaf: False)
    return Edge("with a start")


@pytest.mark.parametrize("remote", [False, True])
def test_planned_step_to_an_obs_outside_its_space_is_faulty(remote):
    url = free_url()
    sim = Sim(unchecked, url) if remote else None
    try:
        with corral.Snapshots(url if remote else lambda: Edge("with a start")) as snapshots:
            steps = snapshots.expand([snapshots.save()] * 2, [0, 1])
    finally:
        if sim is not None:
            sim.end()
    assert steps.faulty.tolist() == [False, True]
    assert steps.obs.tolist() == [2, 2]


def test_row_model_with_an_obs_outside_its_space_is_faulty():
    class Line:
        """Action 1 moves on."""

        width, stochastic = 1, False

        def look(self, rows):
            return rows[:, 0].astype(np.int64)

        def step(self, rows, actions, seeds):
            rows[:, 0] += actions
            return np.zeros(len(rows)), *np.zeros((2, len(rows)), np.bool_)

    spec = corral.make_vec(lambda: Strays("discrete"), 1, "local").spec
    states = ArrayStates(Line(), spec)
    here = states.put(np.array([[4.0]]))
    steps = states.expand(np.repeat(here, 2), np.array([0, 1]), states.new_ids(2))
    assert steps.faulty.tolist() == [False, True]
    assert steps.obs.tolist() == [4, 4]
