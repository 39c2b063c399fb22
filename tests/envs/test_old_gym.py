"""`corral.envs.old_gym`: environments with the interface of gym before 0.26."""

from __future__ import annotations

import logging
from collections import namedtuple
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from helpers.old_envs import WALK_SPACES, AdaptedWalk, FiveValues, SeededWalk, Walk

import corral
from corral.cli.main import main
from corral.envs.adapters.old_gym import _announced
from corral.testing import check_env

old_gym = corral.envs.old_gym


def test_old_reset_and_step_become_gymnasiums():
    env = AdaptedWalk()
    assert isinstance(env, gymnasium.Env)
    obs, info = env.reset(seed=3)
    assert obs.shape == (1,)
    assert info == {}
    results = [env.step(k % 2) for k in range(5)]
    assert [result[2:4] for result in results] == [(False, False)] * 4 + [(False, True)], "cut by a time limit"
    env.reset()
    *_, terminated, truncated, _ = [env.step(1) for _ in range(4)][-1]
    assert (terminated, truncated) == (True, False)
    env.close()
    assert env.unwrapped.old.closed


def test_a_seedless_reset_with_info_and_five_values_work():
    env = old_gym(FiveValues, **WALK_SPACES)()
    assert env.reset(seed=1)[1] == {"start": True}
    assert len(env.step(0)) == 5


@pytest.mark.parametrize("nothing", [None, {}])
def test_a_class_without_infos_ends_its_episodes(nothing):
    class Bare(Walk):
        def step(self, action):
            return *super().step(action)[:3], nothing

    with corral.make_vec(old_gym(Bare, **WALK_SPACES), 1, "local") as vec:
        batches = [vec.recv()]
        for _ in range(5):
            vec.send(batches[-1].env_ids, np.array([1]))
            batches.append(vec.recv())
    assert any(batch.terminated[0] for batch in batches)
    assert not any(batch.faulty[0] for batch in batches)


def test_seed_of_the_class_gets_the_seed():
    def starts(seed):
        env = old_gym(SeededWalk)()
        return [env.reset(seed=seed)[0].item(), *(env.reset()[0].item() for _ in range(20))]

    assert starts(5) == starts(5) != starts(6)


def test_render_with_a_mode_gives_frames_of_the_wanted_kind():
    env = old_gym(SeededWalk)(render_mode="rgb_array")
    assert env.metadata == {"render_modes": ["rgb_array"], "render_fps": 7}
    assert env.render().shape == (4, 4, 3)


def test_spaces_of_the_gym_package_are_converted():
    def old(kind, **values):
        return type(kind, (SimpleNamespace,), {})(**values)

    box = old("Box", low=np.zeros(2, np.float32), high=np.ones(2, np.float32), dtype=np.dtype(np.float32))
    both = old("Dict", spaces={"a": box, "b": old("Tuple", spaces=[old("MultiDiscrete", nvec=np.array([2, 3]))])})
    made = old_gym(Walk, observation_space=both, action_space=old("Discrete", n=2))
    inner = spaces.Tuple([spaces.MultiDiscrete([2, 3])])
    assert made.observation_space == spaces.Dict({"a": spaces.Box(0, 1, (2,)), "b": inner})
    assert made.action_space == spaces.Discrete(2)
    with pytest.raises(corral.UserError, match="pass a space of gymnasium"):
        old_gym(Walk, observation_space=3)


def test_imitations_of_gyms_spaces_are_converted():
    box = namedtuple("BoxSpace", "low high shape dtype")(0, 255, (4, 4, 3), np.uint8)  # as Crafter has without gym
    made = old_gym(Walk, observation_space=box, action_space=namedtuple("DiscreteSpace", "n")(5))
    assert made.observation_space == spaces.Box(0, 255, (4, 4, 3), np.uint8)
    assert made.action_space == spaces.Discrete(5)


def test_a_space_of_the_class_that_is_none_names_the_remedy():
    odd = type("Odd", (Walk,), {"observation_space": 7, "action_space": spaces.Discrete(2)})
    with pytest.raises(corral.UserError, match=r"the space 7: pass a space .*spaces, old_gym\(Odd, observation_space="):
        old_gym(odd)()


def test_a_class_without_render_says_so(tmp_path):
    corral.train("ppo", AdaptedWalk, 64, run_dir=tmp_path / "run", num_envs=2, num_steps=16, quiet=True)
    with pytest.raises(corral.UserError, match=r"Walk has no render\(\): add one that returns uint8"):
        corral.record(tmp_path / "run", tmp_path / "x.gif", env=AdaptedWalk)


def test_an_adapted_class_trains_as_an_object(tmp_path):
    result = corral.train("ppo", AdaptedWalk, 64, run_dir=tmp_path / "run", num_envs=2, num_steps=16, quiet=True)
    assert result.steps == 64
    assert corral.resume(tmp_path / "run", steps=96, env=AdaptedWalk, quiet=True).steps == 96


def test_an_old_class_without_seeds_is_a_warning():
    class Restless(Walk):
        def __init__(self):
            super().__init__()
            self.generator = np.random.default_rng()

        def reset(self):
            super().reset()
            self.x = self.generator.random()
            return np.array([self.x], np.float32)

    found = {each.name: each for each in check_env(old_gym(Restless, **WALK_SPACES), steps=20)}
    assert found["determinism"].status == "warn"
    assert "neither seed() nor reset(seed)" in found["determinism"].detail


def test_missing_spaces_are_named():
    with pytest.raises(corral.UserError, match=r"Walk has no observation_space: pass one, old_gym\(Walk"):
        old_gym(Walk)()


def test_the_meaning_of_done_is_said_once(caplog):
    _announced.clear()
    with caplog.at_level(logging.INFO, "corral.envs"):
        for _ in range(3):
            corral.make_vec(AdaptedWalk, 1, backend="local").close()
    (message,) = [record.getMessage() for record in caplog.records if "old gym" in record.getMessage()]
    assert "done counts as terminated" in message


@pytest.mark.parametrize("backend", ["local", "process"])
def test_an_adapted_class_trains_by_name_on_every_backend(backend, tmp_path):
    result = corral.train("ppo", "helpers.old_envs:AdaptedWalk", 64, run_dir=tmp_path / "run", backend=backend,
        num_envs=2, num_steps=16, eval_episodes=1, quiet=True)  # fmt: skip
    assert result.steps == 64
    assert corral.resume(tmp_path / "run", steps=96, quiet=True).steps == 96


@pytest.mark.parametrize("env", ["helpers.old_envs:Walk", "helpers.old_envs:SeededWalk"])
@pytest.mark.parametrize("command", [["train", "ppo", "--env"], ["check-env"]])
def test_refused_old_classes_are_told_the_adapter(env, command, capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = main([*command, env])
    out, err = capfd.readouterr()
    assert code == (2 if command[0] == "train" else 1)
    assert "corral.envs.old_gym(" in " ".join((out + err).split())
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").iterdir())
