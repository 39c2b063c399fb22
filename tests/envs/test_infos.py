"""`make_vec(info=...)`: chosen values of the environments' infos, as typed arrays, on every backend that has them."""

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from helpers.on_runtimes import RAY_BACKEND
from helpers.sims import Sim, free_url

import corral
from corral.core.errors import UserError
from corral.core.types import stack_infos
from corral.testing import CountingEnv, FaultyEnv

BACKENDS = ["local", "process", pytest.param("ray", marks=[*RAY_BACKEND, pytest.mark.slow])]


class InfoEnv(gymnasium.Env):
    """Episodes of `length` steps; its infos reuse one array and one dict."""

    observation_space = spaces.Box(0, 100, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, length=3):
        self.length, self.where, self.info = length, np.zeros(2, np.float32), {}

    def _seen(self):
        return np.full(1, self.t, np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._seen(), {"start": (options or {}).get("start", -1), "unused": object()}

    def step(self, action):
        self.t += 1
        self.where[:] = self.t
        over = self.t >= self.length
        self.info = {"where": self.where, "unused": object()}
        if over:
            self.info |= {"is_success": np.bool_(action), "episode": {"l": self.t, "r": 0.5 * self.t}}
        return self._seen(), 0.0, over, False, self.info


KEYS = ("is_success", "where", "start", "episode")


@pytest.mark.parametrize("backend", BACKENDS)
def test_infos_are_typed_arrays_of_the_step(backend):
    with corral.make_vec([lambda: InfoEnv(2), lambda: InfoEnv(3)], 2, backend, workers=2, info=KEYS) as vec:
        batch = vec.recv()
        assert batch.info.keys() == {"start", "_start"}
        assert batch.info["start"].tolist() == [-1, -1]
        kept = []
        for t in (1, 2):
            vec.send(batch.env_ids, np.ones(2, np.int64))
            batch = vec.recv()
            assert batch.info["where"].dtype == np.float32
            kept.append((t, batch.infos))
        ended = batch.info
        assert ended["is_success"].dtype == np.bool_
        assert ended["is_success"].tolist() == [True, False]
        assert ended["_is_success"].tolist() == [True, False]
        assert ended["episode"]["r"].tolist() == [1.0, 0.0]
        assert ended["episode"]["l"].dtype.kind == "i"
        assert batch.first_infos == [{"start": -1}, {}]
        for t, infos in kept:
            assert all((info["where"] == t).all() for info in infos), "the receiver owns what it got"
        only = batch.take(np.array([1]))
        assert only.info["where"].tolist() == [[2.0, 2.0]]


@pytest.mark.parametrize("backend", ["local", "process"])
def test_without_names_batches_carry_no_infos(backend):
    with corral.make_vec(InfoEnv, 2, backend, workers=1) as vec:
        batch = vec.recv()
        assert batch.infos is None
        assert batch.info == {}


@pytest.mark.parametrize("backend", ["local", "process"])
def test_a_faulty_row_has_no_info_of_its_step(backend):
    class Failing(FaultyEnv):
        def step(self, action):
            *rest, info = super().step(action)
            return (*rest, {**info, "t": self._t})

    with corral.make_vec(lambda: Failing("raise", at=3, length=9), 1, backend, workers=1, info="t") as vec:
        batch = vec.recv()
        seen = []
        for _ in range(12):
            vec.send(batch.env_ids, np.zeros(1, np.int64))
            batch = vec.recv()
            seen.append((bool(batch.faulty[0]), "t" in batch.infos[0]))
        assert (True, False) in seen
        assert (True, True) not in seen
        assert (False, True) in seen


@pytest.mark.parametrize("backend", ["local", "process"])
def test_an_info_that_cannot_be_copied_is_one_sentence(backend):
    class Locked(InfoEnv):
        def step(self, action):
            import threading

            return *super().step(action)[:4], {"where": threading.Lock()}

    with corral.make_vec(Locked, 1, backend, info=("where",)) as vec:
        batch = vec.recv()
        vec.send(batch.env_ids, np.zeros(1, np.int64))
        with pytest.raises(UserError, match=r"infos where cannot be copied .* ask for others"):
            vec.recv()


def _infos_by_env(vec, count):
    """The first `count` infos of each environment, of steps and of resets."""
    seen = [[] for _ in range(vec.num_envs)]
    with vec:
        batch = vec.recv()
        while min(map(len, seen)) < count:
            for i, info, first in zip(batch.env_ids.tolist(), batch.infos, batch.first_infos, strict=True):
                seen[i].append(({k: np.asarray(v).tolist() for k, v in info.items()}, first))
            vec.send(batch.env_ids, np.ones(len(batch.env_ids), np.int64))
            batch = vec.recv()
    return [rows[:count] for rows in seen]


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_vector_envs_have_the_infos_of_local(mode):
    factories = [lambda n=n: InfoEnv(n) for n in (2, 3)]
    venv = SyncVectorEnv(factories, autoreset_mode=mode)
    assert _infos_by_env(corral.make_vec(venv, info=KEYS), 9) == _infos_by_env(
        corral.make_vec(factories, 2, "local", info=KEYS), 9
    )


def test_an_info_of_a_vector_env_must_have_its_rows():
    class Shared(gymnasium.vector.VectorWrapper):
        def step(self, actions):
            return (*self.env.step(actions)[:4], {"where": 3})

    venv = Shared(SyncVectorEnv([InfoEnv] * 2, autoreset_mode=AutoresetMode.SAME_STEP))
    with corral.make_vec(venv, info="where") as vec:
        vec.send(vec.recv().env_ids, np.zeros(2, np.int64))
        with pytest.raises(UserError, match="'where' of a vector environment must have 2 rows, got 3"):
            vec.recv()


def test_envpool_has_infos():
    pytest.importorskip("envpool")
    with corral.make_vec("CartPole-v1", 3, "native", info=("elapsed_step", "missing")) as vec:
        batch, age = vec.recv(), np.zeros(3, int)
        assert batch.info["elapsed_step"].tolist() == [0, 0, 0]
        for _ in range(40):
            vec.send(batch.env_ids, np.ones(3, np.int64))
            batch, age = vec.recv(), age + 1
            assert batch.info["elapsed_step"].tolist() == age.tolist()
            assert [info.get("elapsed_step") for info in batch.first_infos] == [0 if f else None for f in batch.first]
            age[batch.first] = 0


def test_ale_has_infos():
    pytest.importorskip("ale_py")
    with corral.make_vec(corral.envs.suites.atari("Breakout"), 2, "native", info=("lives",)) as vec:
        batch, ended = vec.recv(), 0
        assert batch.info["lives"].tolist() == [5, 5]
        for step in range(400):
            vec.send(batch.env_ids, np.full(2, step % 4))
            batch = vec.recv()
            for i in range(2):
                over, lost = batch.game_over[i], batch.first[i] and not batch.game_over[i]
                assert ("lives" in batch.infos[i]) == (not over)  # ALE has only those of the new game
                began = {"lives": 5} if over else batch.infos[i] if lost else {}
                assert batch.first_infos[i] == began
                ended += over
        assert ended


def test_simulators_refuse_the_names_of_infos():
    url = free_url("tcp")
    sim = Sim(lambda: CountingEnv(3), url)
    try:
        with pytest.raises(UserError, match="does not transmit infos"):
            corral.make_vec(url, 1, info=("is_success",))
    finally:
        sim.end()


def test_stack_infos_fills_rows_without_a_value():
    stacked = stack_infos([{"a": 1, "b": "x"}, {}, {"a": 2.5, "c": {"d": np.arange(2)}}])
    assert stacked["a"].tolist() == [1.0, 0.0, 2.5]
    assert stacked["_a"].tolist() == [True, False, True]
    assert stacked["b"].tolist() == ["x", None, None]
    assert stacked["c"]["d"].tolist() == [[0, 0], [0, 0], [0, 1]]
    assert stacked["_c"].tolist() == [False, False, True]


@pytest.mark.parametrize("backend", ["local", "process"])
@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_gymnasium_adapter_hands_infos_on(backend, mode):
    factories = [lambda n=n: InfoEnv(n) for n in (2, 3)]
    ours = corral.make_vec(factories, 2, backend, info=KEYS).as_gymnasium(autoreset=mode)
    theirs = SyncVectorEnv(factories, autoreset_mode=mode)
    start = {"start": 7}
    for env in (ours, theirs):
        _, infos = env.reset(options=dict(start))
        assert infos["start"].tolist() == [7, 7]
    for t in range(8):
        results = [env.step(np.array([t % 2, 1])) for env in (ours, theirs)]
        (*mine, my_infos), (*others, their_infos) = results
        for a, b in zip(mine, others, strict=True):
            np.testing.assert_array_equal(a, b)
        _require_same(their_infos, my_infos)
        if mode is AutoresetMode.DISABLED and (mine[2] | mine[3]).any():
            again = [env.reset(options={"reset_mask": mine[2] | mine[3]})[0] for env in (ours, theirs)]
            np.testing.assert_array_equal(*again)
    ours.close()


def _require_same(expected, actual):
    for key in expected:
        if "unused" in key or key.startswith("_") or key == "final_obs":
            continue
        mask = expected[f"_{key}"]
        np.testing.assert_array_equal(actual[f"_{key}"], mask)
        if isinstance(expected[key], dict):
            _require_same(expected[key], actual[key])
        else:
            np.testing.assert_array_equal(actual[key][mask], expected[key][mask].astype(actual[key].dtype))


def test_is_success_reaches_sb3s_evaluation(tmp_path):
    sb3 = pytest.importorskip("stable_baselines3")
    from stable_baselines3.common.callbacks import EvalCallback
    from stable_baselines3.common.vec_env import VecMonitor

    envs = [corral.make_vec(InfoEnv, 2, "process", workers=1, info=("is_success",)).as_sb3() for _ in range(2)]
    monitored = VecMonitor(envs[0], info_keywords=("is_success",))
    callback = EvalCallback(envs[1], n_eval_episodes=4, eval_freq=16, log_path=tmp_path, warn=False)
    model = sb3.PPO("MlpPolicy", monitored, n_steps=16, batch_size=16, n_epochs=1, device="cpu", seed=0)
    model.learn(64, callback=callback)
    assert len(callback._is_success_buffer) == 4
    assert all("is_success" in info for info in model.ep_info_buffer)
    for env in envs:
        env.close()
