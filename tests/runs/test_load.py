"""`load_policy`: what was trained is what is loaded, from the run's files alone."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

import corral
from corral.core.errors import UserError
from corral.runs.evaluation.evaluate import Evaluation, acting_seed, evaluate_policy, make_eval_vec
from corral.runs.load import load_policy

ROOT = Path(__file__).parents[2]
SMALL = {"num_envs": 2, "preset": "none", "quiet": True, "eval_episodes": 3}
PPO = {**SMALL, "num_steps": 16, "num_minibatches": 1}
ENV = """
import gymnasium, numpy as np
from gymnasium import spaces
class Mine(gymnasium.Env):
    observation_space = spaces.Dict({
        "place": spaces.Box(-5, 5, (3,), np.float32), "mode": spaces.Discrete(3, start=1),
        "pair": spaces.Tuple((spaces.MultiBinary(2), spaces.Box(-1, 1, (), np.float32)))})
    action_space = spaces.Dict({"gear": spaces.Discrete(3, start=1), "move": spaces.Box(-2, 4, (2,), np.float32)})
    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._obs(), {}
    def step(self, action):
        assert self.action_space.contains(action), action
        self.t += 1
        reward = float(action["move"].sum() + action["gear"])
        return self._obs(), reward, bool(self.np_random.random() < 0.1), self.t >= 20, {}
    def _obs(self):
        draw = self.np_random
        return {"place": draw.uniform(-5, 5, 3).astype(np.float32), "mode": np.int64(draw.integers(1, 4)),
                "pair": (draw.integers(0, 2, 2).astype(np.int8), np.float32(draw.uniform(-1, 1)))}
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One small run of each kind: normalised, of values, with memory, and on an environment of the user's own."""
    root = tmp_path_factory.mktemp("runs")
    (root / "my_own_env.py").write_text(ENV)
    corral.train("ppo", "Pendulum-v1", 96, 1, root / "ppo", **PPO, **{"net.normalize_obs": True})
    corral.train("dqn", "CartPole-v1", 160, 2, root / "dqn", **SMALL, learning_starts=32, exploration_fraction=0.5)
    memory = {"net.rnn": "lstm", "net.rnn_size": 8}
    corral.train("ppo", "CartPole-v1", 96, 3, root / "lstm", **PPO, **memory)
    sys.path.insert(0, str(root))
    try:
        corral.train("ppo", "my_own_env:Mine", 96, 4, root / "own", **PPO)
    finally:
        sys.path.remove(str(root))
        sys.modules.pop("my_own_env")
    return root


def in_a_fresh_process(code, *args):
    """What a script prints, as JSON; the environments' modules cannot be found there."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]])}
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, args)], capture_output=True, text=True, timeout=120, env=env, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def observations(policy, n, seed=0):
    space = policy.spec.observation_space
    space.seed(seed)
    layout = policy.spec.observation
    rows = [layout.flatten(space.sample()) for _ in range(n)]
    return layout.unflatten([np.stack(leaf) for leaf in zip(*rows, strict=True)])


def row_of(policy, tree, row):
    return policy.spec.observation.unflatten([leaf[row] for leaf in policy.spec.observation.flatten(tree)])


def test_loading_imports_neither_ray_nor_an_environment(runs):
    code = """
import json, sys, numpy as np, corral
policy = corral.load_policy(sys.argv[1])
obs = {"place": np.zeros(3), "mode": 2, "pair": (np.zeros(2, int), 0.5)}
action = policy(obs)
assert policy.spec.action_space.contains(action), action
unwanted = {"ray", "ale_py", "pygame", "cv2", "my_own_env", "matplotlib", "tensorboard"}
print(json.dumps(sorted(unwanted & set(sys.modules))))
"""
    assert in_a_fresh_process(code, runs / "own") == []


@pytest.mark.parametrize(
    ("name", "which"),
    [
        ("ppo", "best"),
        ("lstm", "latest"),
        *(pytest.param(*case, marks=pytest.mark.slow)
          for case in [("ppo", "latest"), ("lstm", "best"), ("dqn", "best"), ("dqn", "latest")]),
    ],
)  # fmt: skip
def test_evaluation_in_a_fresh_process_equals_that_of_training(runs, name, which):
    code = """
import json, sys, corral
from corral.runs.evaluation.evaluate import acting_seed, evaluate_policy, make_eval_vec
loaded = corral.load_policy(sys.argv[1], sys.argv[2])
seed = loaded.experiment.seed
with make_eval_vec(loaded.experiment, 3, seed) as vec:
    policy = loaded.as_policy(seed=acting_seed(seed, deterministic=True))
    found = evaluate_policy(vec, policy, 3, seed).to_json()
print(json.dumps([found, loaded.evaluation]))
"""
    found, recorded = in_a_fresh_process(code, runs / name, which)
    assert recorded["returns"]
    assert found == {key: recorded[key] for key in found}


def test_the_loaded_policy_decides_as_the_one_in_training(runs, tmp_path):
    """Row by row, also where it samples: against the very network that was trained."""
    from corral.config.experiment import Experiment
    from corral.runs.checkpoints import checkpoint
    from corral.runs.folder import RunFolder
    from corral.topologies.sync import Sync

    folder = RunFolder.open(runs / "ppo")
    trainer = Sync(Experiment.from_dict(folder.config), lambda kind, text: None)
    try:
        trainer.learner.load_state_dict(checkpoint.load(folder, "latest")[0]["trainer"]["learner"])
        loaded = load_policy(runs / "ppo", "latest")
        obs = observations(loaded, 16)
        for deterministic in (True, False):
            ours = loaded.as_policy(deterministic=deterministic, seed=7)
            theirs = trainer.eval_policy(deterministic=deterministic, seed=7)
            for _ in range(3):
                a, b = (policy.act(obs, None, np.zeros(16, bool))[0] for policy in (ours, theirs))
                np.testing.assert_array_equal(a, b)
    finally:
        trainer.close()


def test_loading_reads_nothing_but_the_policy(runs, tmp_path):
    shutil.copytree(runs / "dqn", tmp_path / "run", symlinks=True)
    expected = load_policy(tmp_path / "run")
    for path in (tmp_path / "run" / "checkpoints").glob("step_*"):
        for name in ("state.safetensors", "state.json", "replay.safetensors", "replay.json"):
            (path / name).write_bytes(b"broken")
    found = load_policy(tmp_path / "run")
    for a, b in zip(found.model.parameters(), expected.model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["ppo", "dqn", "own"])
def test_one_observation_or_many(runs, name):
    policy = load_policy(runs / name)
    many = observations(policy, 6)
    actions = policy(many)
    layout = policy.spec.action
    for leaf, value in zip(layout.leaves, layout.flatten(actions), strict=True):
        assert value.shape == (6, *leaf.shape)
    for row in range(6):
        action = policy(row_of(policy, many, row))
        assert policy.spec.action_space.contains(action)
        for one, all_ in zip(layout.flatten(action), layout.flatten(actions), strict=True):
            np.testing.assert_allclose(one, all_[row], rtol=1e-5, atol=1e-6)


def test_lists_and_tensors_are_observations_too(runs):
    policy = load_policy(runs / "ppo")
    wanted = policy(np.float32([0.5, 0.5, 1.0]))
    for obs in ([0.5, 0.5, 1.0], torch.tensor([0.5, 0.5, 1.0]), np.array([0.5, 0.5, 1.0])):
        np.testing.assert_array_equal(policy(obs), wanted)


def test_sampling_is_seeded(runs):
    obs = np.zeros((8, 3), np.float32)
    a, b, c = (load_policy(runs / "ppo", seed=seed) for seed in (1, 1, 2))
    first = a(obs, deterministic=False)
    np.testing.assert_array_equal(first, b(obs, deterministic=False))
    assert (first != c(obs, deterministic=False)).any()
    assert (first != a(obs, deterministic=False)).any()


def test_sampling_of_values_explores_as_little_as_at_that_step(runs):
    policy = load_policy(runs / "dqn", "latest")
    obs = np.zeros((2000, 4), np.float32)
    odd = (policy(obs, deterministic=False) != policy(obs)).mean()
    epsilon = policy.algo.epsilon(1.0)
    assert odd == pytest.approx(epsilon / 2, abs=0.02)


def test_recurrent_state_is_kept_within_an_episode(runs):
    policy = load_policy(runs / "lstm")
    assert policy.recurrent
    assert not load_policy(runs / "ppo").recurrent
    own = policy.as_policy()
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(5, 3, 4)).astype(np.float32)
    first = rng.random((5, 3)) < 0.3
    first[0] = True
    state = own.initial_state(3)
    states = []
    for t in range(5):
        wanted, state, _ = own.act(rows[t], state, first[t])
        np.testing.assert_array_equal(policy(rows[t], first=first[t]), wanted)
        np.testing.assert_array_equal(policy._state, state)
        states.append(state)
    policy.reset()
    policy(rows[0])
    np.testing.assert_array_equal(policy._state, states[0])


def test_recurrent_state_has_a_number_of_rows(runs):
    policy = load_policy(runs / "lstm")
    policy(np.zeros((3, 4)))
    with pytest.raises(UserError, match=r"state of 3 rows but got 2: call reset\(\)"):
        policy(np.zeros((2, 4)))
    with pytest.raises(UserError, match="first must be true or false for each of the 3 rows"):
        policy(np.zeros((3, 4)), first=[True])
    policy.reset()
    policy(np.zeros(4))
    load_policy(runs / "ppo")(np.zeros((2, 3)))


@pytest.mark.parametrize(
    ("name", "obs", "words"),
    [
        ("ppo", np.zeros(4), r"'value' has shape \(4,\), expected \(3,\), or \(n, 3\)"),
        ("ppo", np.zeros((0, 3)), "the same number of rows, at least 1"),
        ("ppo", np.zeros(3, complex), "has dtype complex128, expected float32"),
        ("ppo", np.array([0, 1, np.nan]), "'value' is NaN"),
        ("ppo", "north", "has shape"),
        ("own", np.zeros(3), "does not have the structure"),
        ("own", {"place": np.zeros(3), "mode": 2}, "does not have the structure"),
        ("own", {"place": np.zeros(3), "mode": 0, "pair": ([0, 1], 0.0)}, r"'mode' has values outside Discrete\(3"),
        ("own", {"place": np.zeros(3), "mode": 1.0, "pair": ([0, 1], 0.0)}, "'mode' has dtype float64"),
        ("own", {"place": np.zeros(3), "mode": [1, 1], "pair": ([0, 1], 0.0)}, "the same number of rows"),
        ("own", {"place": np.zeros((2, 3)), "mode": [1], "pair": ([[0, 1]], [0.0])}, "the same number of rows"),
    ],
)
def test_wrong_observation_is_one_line(runs, name, obs, words):
    with pytest.raises(UserError, match=words) as caught:
        load_policy(runs / name)(obs)
    assert "\n" not in str(caught.value)


def test_checkpoints_by_path_and_by_name(runs):
    checkpoints = runs / "ppo" / "checkpoints"
    latest = os.readlink(checkpoints / "latest")
    steps = {
        load_policy(found, which).step
        for found, which in (
            (checkpoints / "latest", "best"),
            (checkpoints / latest, "best"),
            (runs / "ppo", "latest"),
            (runs / "ppo", latest),
        )
    }
    assert steps == {96}
    with pytest.raises(UserError, match="no checkpoint 'nothing'"):
        load_policy(runs / "ppo", "nothing")


def test_a_run_without_a_best_checkpoint_gives_its_latest(runs, tmp_path):
    shutil.copytree(runs / "ppo", tmp_path / "run", symlinks=True)
    (tmp_path / "run" / "checkpoints" / "best").unlink()
    assert load_policy(tmp_path / "run").step == 96


def test_unloadable_run_is_one_line(runs, tmp_path):
    with pytest.raises(UserError, match="no run at"):
        load_policy(tmp_path / "nowhere")
    shutil.copytree(runs / "ppo" / "checkpoints" / "latest", tmp_path / "checkpoint")
    with pytest.raises(UserError, match="a checkpoint without the settings of its run"):
        load_policy(tmp_path / "checkpoint")
    shutil.copytree(runs / "ppo", tmp_path / "run", symlinks=True)
    config = tmp_path / "run" / "config.yaml"
    settings = yaml.safe_load(config.read_text())
    settings["algorithm"]["net"]["hidden_sizes"] = [32, 32]
    config.write_text(yaml.safe_dump(settings))
    with pytest.raises(UserError, match="do not fit the network that the run's config") as caught:
        load_policy(tmp_path / "run")
    assert "\n" not in str(caught.value)


def test_the_interval_of_a_mean_is_students():
    result = Evaluation((1.0, 2.0, 3.0), (1, 1, 1))
    assert result.half_width == pytest.approx(4.303 / 3**0.5, rel=1e-3)
    assert np.isnan(Evaluation((1.0,), (1,)).half_width)
    many = Evaluation(tuple(np.random.default_rng(0).normal(size=100)), (1,) * 100)
    assert many.half_width == pytest.approx(1.984 * np.std(many.returns, ddof=1) / 10, rel=1e-3)


def test_an_episode_without_end_does_not_hold_an_evaluation_up(runs, monkeypatch, caplog):
    from corral.runs.evaluation import evaluate as module

    monkeypatch.setattr(module, "_MAX_STEPS", 7)
    monkeypatch.setattr(module._log, "propagate", True)
    loaded = load_policy(runs / "ppo")
    with make_eval_vec(loaded.experiment, 2, 0) as vec:
        found = evaluate_policy(vec, loaded.as_policy(seed=acting_seed(0, deterministic=True)), 2, 0)
    assert found.lengths == (7, 7)
