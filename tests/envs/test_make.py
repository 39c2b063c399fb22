"""make_vec: what it accepts, what it chooses, and what it refuses."""

import logging
from functools import partial

import gymnasium
import numpy as np
import psutil
import pytest
from gymnasium import spaces

import corral
from corral.envs import auto
from corral.envs.supervision import Supervision
from corral.testing import CountingEnv, FaultyEnv, SlowEnv


class OutOfSpace(CountingEnv):
    """Returns what its space does not have: at the first reset, or later."""

    def __init__(self, how, later=False):
        super().__init__()
        self.observation_space = spaces.Box(0, 1, (4,), np.float32)
        self._how, self._later = how, later

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return (self._bad() if not self._later else np.zeros(4, np.float32)), {}

    def step(self, action):
        return self._bad(), 0.0, False, False, {}

    def _bad(self):
        return {
            "shape": np.zeros(5, np.float32),
            "scalar": np.float32(0),
            "dtype": np.zeros(4, complex),
            "range": np.full(4, 7, np.float32),
            "kind": {"a": 1},
            "none": None,
        }[self._how]


class OldStyle(CountingEnv):
    def step(self, action):
        return self._observe(), 0.0, False, {}


class OldReset(CountingEnv):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)[0]


class VectorReward(CountingEnv):
    def step(self, action):
        obs, _, *rest = super().step(action)
        return obs, np.ones(2), *rest


class TextEnv(CountingEnv):
    def __init__(self):
        super().__init__()
        self.observation_space = spaces.Text(5)


def first_steps(vec):
    with vec:
        batch = vec.recv()
        for _ in range(3):
            vec.send(batch.env_ids, np.zeros(len(batch), np.int64))
            batch = vec.recv()


@pytest.fixture(autouse=True)
def nothing_left_running():
    before = {p.pid for p in psutil.Process().children(recursive=True)}
    yield
    assert {p.pid for p in psutil.Process().children(recursive=True)} <= before


MISTAKES = {
    "unknown id with the nearest names": (lambda: "CartPol-v1", r"Close: CartPole-v1"),
    "unknown module": (lambda: "no_such_module:Env", "cannot be imported"),
    "unknown class": (lambda: "corral.testing:CountingEnb", "close: CountingEnv"),
    "an instance": (lambda: CountingEnv(), "make_vec\\(lambda"),
    "a number": (lambda: 3, "not an environment"),
    "no factory at all": (list, "at least one"),
    "a factory that returns no Env": (lambda: dict, "not a gymnasium.Env"),
    "a factory that returns None": (lambda: lambda: None, "not a gymnasium.Env"),
    "an unsupported space": (lambda: TextEnv, "token ids"),
    "mismatched spaces": (
        lambda: [CountingEnv, partial(OutOfSpace, "range", True)],
        "different observation spaces",
    ),
    "observation of the wrong shape": (
        lambda: partial(OutOfSpace, "shape"),
        r"shape \(5,\), its space says \(4,\)",
    ),
    "observation that would be broadcast": (lambda: partial(OutOfSpace, "scalar"), r"shape \(\)"),
    "observation of the wrong dtype": (lambda: partial(OutOfSpace, "dtype"), "dtype complex"),
    "observation out of range": (lambda: partial(OutOfSpace, "range"), "outside its space"),
    "observation of another kind": (lambda: partial(OutOfSpace, "kind"), "not an array|shape"),
    "observation None": (lambda: partial(OutOfSpace, "none"), "not an array|shape"),
    "wrong shape later on": (lambda: partial(OutOfSpace, "shape", True), "shape"),
    "the old step interface": (lambda: OldStyle, "corral.envs.old_gym"),
    "the old reset interface": (lambda: OldReset, r"must return \(obs, info\)"),
    "a reward that is a vector": (lambda: VectorReward, "must be one number"),
}


@pytest.mark.parametrize("backend", ["auto", "local", "process"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_bad_input_is_one_line(mistake, backend):
    env, words = MISTAKES[mistake]
    with pytest.raises(corral.UserError, match=words) as caught:
        first_steps(corral.make_vec(env(), 2, backend))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "kwargs",
    [
        {"num_envs": 0},
        {"num_envs": -3},
        {"num_envs": 10**9},
        {"workers": 0},
        {"num_envs": 2.5},
        {"num_envs": True},
        {"seed": 1.5},
        {"seed": "a"},
    ],
)
def test_counts_that_make_no_sense_are_refused(kwargs):
    with pytest.raises(corral.UserError, match=r"at least 1|an integer|at most 131,072"):
        corral.make_vec("CartPole-v1", **kwargs)


def test_numbers_of_numpy_are_numbers():
    with corral.make_vec("CartPole-v1", np.int64(2), "process", np.int64(1), np.int64(3)) as vec:
        assert len(vec.recv()) == 2


def test_unknown_roles_and_negative_seeds_are_refused():
    with pytest.raises(corral.UserError, match="train, eval"):
        corral.make_vec("CartPole-v1", role="test")
    with pytest.raises(corral.UserError, match="at least 0"):
        corral.make_vec("CartPole-v1", seed=-1)


def test_more_workers_than_environments_are_not_started():
    with corral.make_vec(partial(SlowEnv, 0.004, 0.004), 2, workers=8) as vec:
        assert len(vec.worker_pids) == 2


def test_auto_sends_failing_env_to_processes():
    with corral.make_vec(partial(FaultyEnv, "raise", 1, 1), 2) as vec:
        assert type(vec).__name__ == "ProcessVecEnv"
        assert "first steps failed" in vec.backend_reason


def test_auto_sends_envs_that_cannot_be_reset_again_to_processes():
    class Once(gymnasium.Env):
        observation_space, action_space = gymnasium.spaces.Discrete(2), gymnasium.spaces.Discrete(2)
        resets = 0

        def reset(self, *, seed=None, options=None):
            self.resets += 1
            if self.resets > 1:
                raise OSError("the game server is gone")
            return 0, {}

        def step(self, action):
            return 0, 0.0, True, False, {}

    assert auto.measure(Once, "Once", Supervision()) is None


def test_an_unknown_backend_is_refused_with_the_known_ones():
    with pytest.raises(corral.UserError, match=r"auto, local, process, native"):
        corral.make_vec("CartPole-v1", backend="proces")


def test_environments_are_found_by_id_by_class_and_by_factory():
    for env in ("CartPole-v1", "corral.testing:CountingEnv", CountingEnv, lambda: CountingEnv()):
        with corral.make_vec(env, 2, "local") as vec:
            assert len(vec.recv()) == 2


def test_keyword_arguments_reach_the_environment():
    with corral.make_vec("corral.testing:CountingEnv", 1, "local", env_kwargs={"length": 2}) as vec:
        batch = vec.recv()
        for expected in (False, True):
            vec.send(batch.env_ids, np.zeros(1, np.int64))
            batch = vec.recv()
            assert batch.terminated[0] == expected


def test_auto_logs_its_choice(caplog):
    with caplog.at_level(logging.INFO, "corral"), corral.make_vec(partial(SlowEnv, 0.004, 0.004), 4) as vec:
        assert type(vec).__name__ == "ProcessVecEnv"
        assert len(vec.worker_pids) == 4
        assert "waiting" in vec.backend_reason
    assert vec.backend_reason in caplog.text
    with corral.make_vec(CountingEnv, 2) as vec:
        assert type(vec).__name__ == "LocalVecEnv"
        assert "a step takes" in vec.backend_reason


@pytest.mark.parametrize(
    ("wall", "cpu", "envs", "workers", "cores", "backend", "count"),
    [
        (5e-6, 5e-6, 8, None, 2, "local", 1),  # cheap: no process can help
        (1e-3, 1e-3, 8, None, 2, "process", 2),  # computing: one worker per core
        (1e-3, 1e-3, 8, None, 1, "local", 1),  # one core: nothing to gain
        (1e-3, 1e-3, 1, None, 4, "local", 1),
        (3e-2, 1e-4, 16, None, 2, "process", 16),  # waiting: as many as environments
        (3e-2, 1e-4, 16, 4, 2, "process", 4),  # the user's number counts
        (1e-3, 1e-3, 8, 4, 8, "process", 4),
    ],
)
def test_auto_follows_the_measured_cost(wall, cpu, envs, workers, cores, backend, count):
    choice = auto.choose(auto.StepCost(wall, cpu), envs, workers, cores)
    assert (choice.backend, choice.workers) == (backend, count)


class SharedCore:
    """Clocks of a process that has its core for a third of the time."""

    wall = cpu = 0.0

    def perf_counter(self):
        self.compute(1e-5)
        return self.wall

    def process_time(self):
        return self.cpu

    thread_time = process_time

    def compute(self, seconds):
        self.cpu += seconds
        self.wall += 3 * seconds

    def sleep(self, seconds):
        self.wall += seconds


@pytest.mark.parametrize(("what", "workers"), [("compute", 2), ("sleep", 8)])
def test_auto_does_not_take_preemption_for_waiting(monkeypatch, what, workers):
    clocks = SharedCore()

    class Busy(CountingEnv):
        def step(self, action):
            getattr(clocks, what)(3e-3)
            return super().step(action)

    monkeypatch.setattr(auto, "time", clocks)
    cost = auto.measure(Busy, "Busy", Supervision())
    assert cost.wall_s == pytest.approx(3e-3, rel=0.1)
    assert auto.choose(cost, 8, None, 2).workers == workers


def test_a_time_limit_of_the_id_is_kept():
    with corral.make_vec("Pendulum-v1", 1, "local") as vec:
        assert vec.spec.max_episode_steps == 200
        batch = vec.recv()
        for t in range(200):
            vec.send(batch.env_ids, np.zeros((1, 1), np.float32))
            batch = vec.recv()
            assert batch.truncated[0] == (t == 199)
            assert not batch.terminated[0]


def test_float64_observations_of_a_float32_space_are_cast():
    class Double(CountingEnv):
        def __init__(self):
            super().__init__()
            self.observation_space = spaces.Box(0, np.inf, (4,), np.float32)

    with corral.make_vec(Double, 2, "local") as vec:
        assert vec.recv().obs.dtype == np.float32


def test_registering_is_not_disturbed():
    before = gymnasium.spec("CartPole-v1")
    with corral.make_vec("CartPole-v1", 1, "local"):
        pass
    assert gymnasium.spec("CartPole-v1") == before
    assert before.order_enforce


def test_name_that_builds_no_environment_is_described():
    with pytest.raises(corral.UserError, match="os:path is of type module, not a class or function of environments"):
        corral.make_vec("os:path", 1)


def test_unused_workers_of_a_local_backend_are_reported(caplog):
    caplog.set_level("INFO", "corral")
    with corral.make_vec("CartPole-v1", 2, workers=2):
        assert "workers=2 is not used" in caplog.text


def test_process_backend_has_a_worker_per_env_that_waits():
    with corral.make_vec(partial(SlowEnv, 0.02, 0.03), 6, "process", cores=2) as vec:
        assert len(vec.worker_pids) == 6
        assert "6 workers, because a step takes" in vec.backend_reason
        assert vec.resolved_backend == ("process", 6)
        assert len(vec.recv()) == 6
    with corral.make_vec(partial(SlowEnv, 0.02, 0.03), 6, "process", workers=2) as vec:
        assert len(vec.worker_pids) == 2, "what was asked for"


class OncePerProcess(CountingEnv):
    made = 0

    def __init__(self):
        OncePerProcess.made += 1
        if OncePerProcess.made > 3:
            raise OSError("the port is in use")
        super().__init__()


class KillsWhenMeasured(CountingEnv):
    made = 0

    def __init__(self):
        KillsWhenMeasured.made += 1
        if KillsWhenMeasured.made == 4:
            raise SystemExit(9)
        super().__init__()


@pytest.mark.parametrize("env", [CountingEnv, OncePerProcess, KillsWhenMeasured])
def test_process_backend_has_a_worker_per_core_otherwise(env):
    with corral.make_vec(env, 6, "process", cores=2) as vec:
        assert len(vec.worker_pids) == 2
        assert vec.resolved_backend is None
        assert len(vec.recv()) == 6
        assert vec.restarts == 0
