"""Environments that show masks of their legal actions, and algorithms that ignore them."""

import json

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import corral
from corral.algos.registry import ALGORITHMS
from corral.cli.main import main

SMALL = {"steps": 64, "num_envs": 2, "num_steps": 16, "eval_episodes": 0, "quiet": True}


class InfoMasks(gymnasium.Env):
    """Its masks are in the infos, as Gymnasium's Taxi shows them."""

    observation_space, action_space = spaces.Box(-1, 1, (3,)), spaces.Discrete(3)
    shown = True

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._obs(), self._info()

    def step(self, action):
        self.t += 1
        return self._obs(), 0.0, self.t == 10, False, self._info()

    def _obs(self):
        return np.zeros(3, np.float32)

    def _info(self):
        return {"action_mask": np.array([1, 1, 0], np.int8)} if self.shown else {}


class ObservedMasks(InfoMasks):
    """Its masks are part of the observations, as PettingZoo shows them."""

    observation_space = spaces.Dict({"board": spaces.Box(-1, 1, (3,)), "action_mask": spaces.Box(0, 1, (3,), np.int8)})

    def _obs(self):
        return {"board": super()._obs(), "action_mask": super()._info()["action_mask"]}

    def _info(self):
        return {}


class NoMasks(InfoMasks):
    shown = False


class StrictGame(InfoMasks):
    """Refuses illegal actions, as the games do."""

    needs_masks = True


def warnings(folder):
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [event for event in events if event["kind"] == "masks_ignored"]


@pytest.mark.parametrize("backend", ["local", "process"])
@pytest.mark.parametrize(("env", "count"), [("InfoMasks", 1), ("ObservedMasks", 1), ("NoMasks", 0)])
def test_ignored_masks_are_one_warning(env, count, backend, tmp_path, caplog):
    corral.train("ppo", env=f"test_action_masks:{env}", run_dir=tmp_path, backend=backend, workers=1, **SMALL)
    assert len(warnings(tmp_path)) == count
    assert caplog.text.count("shows action masks, and ppo ignores them") == count


def test_masks_seen_by_actors_are_one_warning(tmp_path):
    settings = SMALL | {"topology": "actor_learner", "actors": 2, "runtime": "inline", "batch_size": 2}
    corral.train("impala", env=lambda: InfoMasks(), run_dir=tmp_path, **settings)
    assert len(warnings(tmp_path)) == 1


def test_masks_seen_by_workers_are_one_warning(tmp_path):
    settings = SMALL | {"actors": 2, "runtime": "inline"}
    corral.train("dppo", env=lambda: InfoMasks(), run_dir=tmp_path, **settings)
    assert len(warnings(tmp_path)) == 1


@pytest.mark.parametrize("algo", ["ppo", "dqn", "dppo"])
def test_a_game_that_needs_masks_is_refused(algo, tmp_path, capsys):
    options = ["--env", "test_action_masks:StrictGame", "--run-dir", str(tmp_path / "run"), "--quiet"]
    assert main(["train", algo, *options]) == 2
    assert f"{algo} ignores masks: use alphazero" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_pettingzoo_is_refused_by_ppo(tmp_path, capsys):
    pytest.importorskip("pettingzoo")
    options = ["--env-kwargs", "game=tictactoe_v3", "--run-dir", str(tmp_path / "run"), "--quiet"]
    assert main(["train", "ppo", "--env", "corral.envs.suites.games:PettingZoo", *options]) == 2
    assert "use alphazero" in capsys.readouterr().err


def test_algorithms_say_themselves_whether_they_use_masks():
    users = {name for name, entry in ALGORITHMS.items() if entry.load().uses_action_masks}
    assert users == {"alphazero"}
