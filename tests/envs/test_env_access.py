"""The adapters reach into the environments: calls, attributes, pictures, seeds and options, and the errors of both."""

import multiprocessing
import time

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError, ResetNeeded
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import TimeLimit
from helpers.on_runtimes import RAY_BACKEND

import corral
from corral.core.errors import EnvFailed, UserError
from corral.core.seeding import env_seeds
from corral.envs.adapters.as_gymnasium import AsGymnasium
from corral.testing import CountingEnv, TreeEnv

BACKENDS = ["local", "process", pytest.param("ray", marks=[*RAY_BACKEND, pytest.mark.slow])]


class RoomEnv(gymnasium.Env):
    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = spaces.Discrete(2)
    gravity = 9.8

    def __init__(self, render_mode=None):
        self.render_mode = render_mode
        self.metadata = {"render_modes": ["rgb_array"], "render_fps": 7}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.seed, self.options = seed, options
        return self.np_random.random(2), {}

    def step(self, action):
        return self.np_random.random(2), 1.0, False, False, {}

    def add(self, a, b=0):
        return a + b + self.gravity

    def fail(self):
        raise LookupError("no such thing")

    def render(self):
        return np.full((4, 5, 3), int(self.gravity), np.uint8)


def room(**kwargs):
    return TimeLimit(RoomEnv(**kwargs), 1000)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gymnasium_calls_reads_and_sets(backend):
    env = corral.make_vec(room, 3, backend, workers=2, env_kwargs={"render_mode": "rgb_array"}).as_gymnasium()
    assert (env.render_mode, env.metadata["render_fps"]) == ("rgb_array", 7)
    env.set_attr("gravity", [1.0, 2.0, 3.0])  # before the first reset, too
    env.reset(seed=0)
    assert env.get_attr("gravity") == (1.0, 2.0, 3.0)
    assert env.call("add", 1, b=1) == (3.0, 4.0, 5.0)
    assert [picture[0, 0, 0] for picture in env.render()] == [1, 2, 3]
    env.set_attr("gravity", 5)
    assert env.call("gravity") == (5, 5, 5)
    assert env.np_random_seed == tuple(env_seeds(0, "train", 3))
    with pytest.raises(UserError, match="3 environments"):
        env.set_attr("gravity", [1.0])
    env.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_sb3_calls_reads_sets_and_tells_wrappers(backend):
    pytest.importorskip("stable_baselines3")
    from stable_baselines3.common.monitor import Monitor

    vec = corral.make_vec([room, lambda: Monitor(room()), room], 3, backend, workers=2)
    env = vec.as_sb3()
    env.reset()
    env.set_attr("gravity", 4.0, indices=[0, -1])
    assert env.get_attr("gravity") == [4.0, 9.8, 4.0]
    assert env.env_method("set_wrapper_attr", "gravity", 4.0, indices=0) == [True]
    assert env.env_method("add", 1, b=2, indices=0) == [12.8]
    assert env.env_is_wrapped(Monitor) == [False, True, False]
    assert env.env_is_wrapped(TimeLimit) == [True, True, True]
    assert not env.has_attr("nothing")
    env.set_options([{"level": 1}, {}, {"level": 3}])
    env.reset()
    assert env.get_attr("options") == [{"level": 1}, None, {"level": 3}]
    env.reset()
    assert env.get_attr("options") == [None] * 3
    env.close()


@pytest.mark.parametrize("backend", ["local", "process"])
def test_a_failing_call_raises_its_own_exception(backend):
    with corral.make_vec(room, 2, backend, workers=2) as vec:
        env = vec.as_gymnasium()
        env.reset()
        with pytest.raises(LookupError, match="no such thing"):
            env.call("fail")
        with pytest.raises(AttributeError, match="nothing"):
            env.get_attr("nothing")
        obs = env.step(np.zeros(2, np.int64))[0]
        assert np.isfinite(obs).all(), "they run on"


@pytest.mark.parametrize("name", ["step", "reset", "close"])
def test_calls_that_break_transitions_are_refused(name):
    with corral.make_vec(room, 2, "local") as vec:
        env = vec.as_gymnasium()
        with pytest.raises(UserError, match=f"call {name}\\(\\) of the vector environment"):
            env.call(name)
        with pytest.raises(UserError, match="wrap them before"):
            env.set_attr(name, None)


def test_a_backend_without_access_says_so():
    venv = SyncVectorEnv([room] * 2, autoreset_mode=AutoresetMode.SAME_STEP)
    with corral.make_vec(venv) as vec:
        env = AsGymnasium(vec)
        assert env.render_mode is None
        env.reset(seed=1)
        for use in (env.render, lambda: env.call("add", 1), lambda: env.set_attr("gravity", 1)):
            with pytest.raises(UserError, match="does not give access to its environments"):
                use()
        with pytest.raises(UserError, match="a list of seeds, options and masks need backend='local' or 'process'"):
            env.reset(seed=[1, 2])


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_environment_gets_its_own_seed(backend):
    env = corral.make_vec(room, 3, backend, workers=2).as_gymnasium()
    first, _ = env.reset(seed=[5, 6, 7])
    assert env.get_attr("seed") == (5, 6, 7)
    assert env.reset(seed=np.array([5, 6, 8]))[0][:2].tolist() == first[:2].tolist()
    env.reset(seed=[5, None, 7])
    assert env.get_attr("seed") == (5, None, 7)
    both = env.reset(seed=3, options={"level": 2})[0]
    assert env.get_attr("options") == ({"level": 2},) * 3
    np.testing.assert_array_equal(both, env.reset(seed=3)[0])
    env.close()


@pytest.mark.parametrize("backend", ["local", "process"])
@pytest.mark.parametrize("mode", ["next_step", "disabled"])
def test_a_mask_resets_only_its_environments(backend, mode):
    with corral.make_vec(lambda: CountingEnv(50), 3, backend, workers=2) as vec:
        env = vec.as_gymnasium(autoreset=mode)
        env.reset(seed=0)
        for _ in range(3):
            before, *_ = env.step(np.zeros(3, np.int64))
        mask = np.array([True, False, True])
        obs, _ = env.reset(options={"reset_mask": mask})
        assert obs[:, 2].tolist() == [0, 3, 0]
        np.testing.assert_array_equal(obs[1], before[1])
        obs, *_ = env.step(np.zeros(3, np.int64))
        assert obs[:, 2].tolist() == [1, 4, 1]


def test_disabled_autoreset_refuses_a_step_after_the_end():
    with corral.make_vec(lambda: CountingEnv(2), 2, "local") as vec:
        env = vec.as_gymnasium(autoreset="disabled")
        env.reset()
        for _ in range(2):
            *_, terminated, _, _ = env.step(np.zeros(2, np.int64))
        assert terminated.all()
        with pytest.raises(ResetNeeded, match="reset_mask"):
            env.step(np.zeros(2, np.int64))


@pytest.mark.parametrize("backend", ["local", "process"])
def test_steps_and_resets_run_asynchronously(backend):
    env = corral.make_vec(room, 2, backend, workers=2).as_gymnasium()
    with pytest.raises(ResetNeeded, match=r"reset\(\) first"):
        env.step(np.zeros(2, np.int64))
    with pytest.raises(NoAsyncCallError):
        env.reset_wait()
    env.reset_async(seed=1)
    with pytest.raises(AlreadyPendingCallError, match="pending call to `reset`"):
        env.step_async(np.zeros(2, np.int64))
    env.reset_wait()
    env.step_async([0, 1])
    with pytest.raises(AlreadyPendingCallError, match=r"step_wait\(\) first"):
        env.get_attr("gravity")
    assert env.step_wait(timeout=60)[1].tolist() == [1.0, 1.0]
    with pytest.raises(TypeError, match="one row for each"):
        env.step(0)
    env.close()
    for use in (env.reset, lambda: env.step([0, 1]), lambda: env.call("add", 1), env.render):
        with pytest.raises(ClosedEnvironmentError):
            use()


def test_a_timeout_leaves_the_step_under_way():
    class Waits(RoomEnv):
        def step(self, action):
            time.sleep(1.5)
            return super().step(action)

    env = corral.make_vec(Waits, 1, "process").as_gymnasium()
    env.reset()
    env.step_async([0])
    with pytest.raises(multiprocessing.TimeoutError, match="timed out"):
        env.step_wait(timeout=0.01)
    assert env.step_wait()[1].tolist() == [1.0]
    env.close()


@pytest.mark.parametrize("backend", ["local", "process"])
def test_spaces_that_differ_are_a_runtime_error(backend):
    with pytest.raises(RuntimeError, match="different observation spaces") as caught:
        corral.make_vec([room, lambda: CountingEnv(3)], backend=backend, workers=2)
    assert isinstance(caught.value, UserError)


def test_worker_failures_have_the_original_exception():
    class Broken(RoomEnv):
        def reset(self, *, seed=None, options=None):
            raise LookupError("no level")

    with corral.make_vec(Broken, 1, "process") as vec, pytest.raises(EnvFailed, match="no level") as caught:
        vec.recv()
    assert isinstance(caught.value.__cause__, LookupError)


@pytest.mark.parametrize("backend", ["local", "process"])
def test_a_seed_that_fails_is_one_sentence_with_its_cause(backend):
    class Picky(RoomEnv):
        def reset(self, *, seed=None, options=None):
            if seed == 1:
                raise LookupError("no level 1")
            return super().reset(seed=seed, options=options)

    env = corral.make_vec(Picky, 2, backend).as_gymnasium()
    env.reset(seed=[0, 0])
    with pytest.raises(EnvFailed, match=r"^\S+Picky cannot be reset: LookupError: no level 1 .*\.$") as caught:
        env.reset(seed=[0, 1])
    assert isinstance(caught.value.__cause__, LookupError)
    env.close()


@pytest.mark.parametrize("adapter", ["as_gymnasium", "as_sb3"])
def test_lists_of_nested_actions_are_batched(adapter):
    if adapter == "as_sb3":
        pytest.importorskip("stable_baselines3")
    with corral.make_vec(TreeEnv, 3, "local") as vec:
        env = getattr(vec, adapter)()
        env.reset()
        vec.spec.action_space.seed(0)
        actions = [vec.spec.action_space.sample() for _ in range(3)]
        obs = env.step(actions)[0]
        for k, action in enumerate(actions):
            assert obs["echo"]["gear"][k] == action["gear"]


def test_sb3_step_before_reset_names_the_call():
    pytest.importorskip("stable_baselines3")
    with corral.make_vec(room, 1, "local") as vec, pytest.raises(UserError, match=r"Call reset\(\) first"):
        vec.as_sb3().step(np.zeros(1, np.int64))


def test_sb3_renders_a_tiled_picture():
    pytest.importorskip("stable_baselines3")
    with corral.make_vec(room, 2, "process", env_kwargs={"render_mode": "rgb_array"}) as vec:
        env = vec.as_sb3()
        env.reset()
        assert [image.shape for image in env.get_images()] == [(4, 5, 3)] * 2
        assert env.render().ndim == 3


@pytest.mark.parametrize("backend", ["local", "process"])
def test_observation_wrappers_work_with_next_step_autoreset(backend):
    from gymnasium.wrappers import vector as wrappers

    plain = corral.make_vec("CartPole-v1", 3, backend, workers=2).as_gymnasium(autoreset="next_step")
    env = wrappers.NormalizeObservation(wrappers.RecordEpisodeStatistics(plain))
    env.reset(seed=0)
    rng, ends = np.random.default_rng(0), 0
    for _ in range(80):
        obs, _, terminated, truncated, _ = env.step(rng.integers(2, size=3))
        ends += int((terminated | truncated).sum())
    assert ends > 3
    assert obs.shape == (3, 4)
    env.close()


def test_an_unknown_autoreset_mode_names_the_known():
    with corral.make_vec(room, 1, "local") as vec, pytest.raises(UserError, match="same_step"):
        vec.as_gymnasium(autoreset="sometimes")
