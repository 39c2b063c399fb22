"""Runs that are killed, stopped or damaged go on as if nothing had happened."""

import csv
import itertools
import json
import multiprocessing
import os
import random
import signal
import threading
import time
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from corral.config.experiment import Experiment
from corral.core.errors import UserError
from corral.envs import auto
from corral.runs.checkpoints.checkpoint import load
from corral.runs.folder import RunFolder
from corral.runs.train import resume, train
from corral.testing.envs import IdentityEnv
from corral.topologies.sync import Sync

torch.set_num_threads(1)  # for small networks more only wait for each other

CASES = {
    "ppo": ("ppo", {"num_steps": 16, "normalize_obs": True, "normalize_reward": True, "num_minibatches": 2}),
    "ppo, processes": ("ppo", {"num_steps": 16, "backend": "process", "workers": 2}),
    "ppo, lstm": ("ppo", {"num_steps": 16, "rnn": "lstm", "rnn_size": 8, "hidden_sizes": (8,), "normalize_obs": True}),
    "a2c": ("a2c", {"normalize_reward": True}),
    "reinforce": ("reinforce", {"episodes_per_update": 3}),
    "impala, replayed": ("impala", {"topology": "sync", "num_steps": 8, "batch_size": 4, "replay_fraction": 0.5}),
    "dqn": ("dqn", {"learning_starts": 100, "buffer_size": 500, "target_update_period": 20, "normalize_obs": True}),
    "dqn, prioritised": ("dqn", {"learning_starts": 100, "buffer_size": 500, "prioritized_replay": True, "n_step": 3}),
}
COMMON = {"num_envs": 4, "backend": "local", "preset": "none", "device": "cpu", "precision": "fp32", "quiet": True}
CLOCKS = {"checkpoint_every_s": 0, "log_every_s": 0, "eval_episodes": 2}
STEPS = 2000


def settings_of(case, **changes):
    algo, settings = CASES[case]
    clocks = {"checkpoint_every": 150, "log_every": 100, "eval_every": 1000}
    return {"algo": algo, "env": "CartPole-v1", "steps": STEPS, **COMMON, **CLOCKS, **clocks, **settings, **changes}


def context():
    """Children that start at once, because what they need is loaded already."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(
        ["corral.runs.train", "corral.runs.training_loop", "corral.algos.ppo", "corral.algos.dqn"]
    )
    return found


def start(function, *args, **kwargs):
    child = context().Process(target=function, args=args, kwargs=kwargs, daemon=False)
    child.start()
    return child


def in_child(function, *args, **kwargs):
    torch.set_num_threads(1)
    function(*args, **kwargs)


def wait_for(condition, child, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert child.is_alive(), f"the run ended by itself with {child.exitcode}"
        assert time.monotonic() < deadline
        time.sleep(0.002)


def checkpoints(path):
    return sorted(entry.name for entry in (path / "checkpoints").glob("step_*"))


def kill_at_a_random_moment(child, path, chance):
    """SIGKILL, some time after a checkpoint that was not there before; returns whether it was still running."""
    before = checkpoints(path)
    deadline = time.monotonic() + 60
    while child.is_alive() and checkpoints(path) in (before, []):
        assert time.monotonic() < deadline
        time.sleep(0.002)
    child.join(chance.uniform(0, 0.1))
    killed = child.is_alive()
    if killed:
        os.kill(child.pid, signal.SIGKILL)
    child.join(30)
    assert killed or child.exitcode == 0
    return killed


def final_state(path):
    return load(RunFolder.open(path))[0]


def assert_same(a, b, path=""):
    """The same state, bit by bit, but for what was measured in seconds."""
    assert type(a) is type(b), path
    if isinstance(a, dict):
        assert a.keys() == b.keys(), path
        for key in a:
            if key != "wall_s":
                assert_same(a[key], b[key], f"{path}/{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), path
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{path}/{i}")
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b), path
    elif isinstance(a, np.ndarray):
        np.testing.assert_array_equal(a, b, err_msg=path)
    else:
        assert a == b or (a != a and b != b), path


def rows(path):
    """The rows of metrics.csv without what depends on the clock."""
    with open(path / "metrics.csv") as file:
        found = list(csv.DictReader(file))
    return [{k: v for k, v in row.items() if k != "wall_s" and not k.startswith("time/")} for row in found]


def events(path, kind=None):
    found = [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines()]
    return [event for event in found if kind in (None, event["kind"])]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Trains a case to its end, once: the folder and the result."""
    done = {}

    def get(case):
        if case not in done:
            folder = tmp_path_factory.mktemp("whole")
            done[case] = folder, train(run_dir=folder, **settings_of(case))
        return done[case]

    return get


QUICK = ("ppo", "dqn, prioritised")


@pytest.mark.parametrize("case", [*QUICK, *(pytest.param(c, marks=pytest.mark.slow) for c in CASES if c not in QUICK)])
def test_killed_run_resumes_exactly(tmp_path, uninterrupted, case):
    chance = random.Random(case)
    broken, (whole, expected) = tmp_path / "broken", uninterrupted(case)
    killed = kill_at_a_random_moment(start(in_child, train, run_dir=broken, **settings_of(case)), broken, chance)
    assert killed
    kill_at_a_random_moment(start(in_child, resume, broken, quiet=True), broken, chance)
    result = resume(broken, quiet=True)
    assert (result.steps, result.version) == (expected.steps, expected.version)
    assert (result.eval_return, result.best_return) == (expected.eval_return, expected.best_return)
    assert_same(final_state(broken), final_state(whole))
    assert any("every environment continues its episode" in event["text"] for event in events(broken, "resumed"))
    assert rows(broken) == rows(whole)


@pytest.mark.parametrize("case", ["ppo", "reinforce", "impala, replayed", "dqn, prioritised"])
def test_the_next_turns_after_loading_are_those_without(case):
    settings = {k: v for k, v in settings_of(case).items() if k not in ("algo", "env", "preset", "quiet")}
    experiment = Experiment.make(CASES[case][0], "CartPole-v1", preset="none", overrides=settings)
    first, second = (Sync(experiment, lambda kind, text: None) for _ in range(2))
    try:
        for _ in range(12):
            first.advance()
        assert second.load_state_dict(first.state_dict()) == []
        for _ in range(12):
            said, again = first.advance(), second.advance()
            assert_same({k: [float(x) for x in v] for k, v in said.items()},
                        {k: [float(x) for x in v] for k, v in again.items()})  # fmt: skip
            assert torch.equal(first.learner.flat.weights, second.learner.flat.weights)
    finally:
        first.close()
        second.close()


# -- told to stop --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_stopped_run_saves_and_resumes_exactly(tmp_path, uninterrupted, number):
    stopped, (whole, _) = tmp_path / "stopped", uninterrupted("ppo")
    child = start(in_child, train, run_dir=stopped, **settings_of("ppo"))
    wait_for(lambda: checkpoints(stopped), child)
    os.kill(child.pid, number)
    child.join(30)
    assert child.exitcode == 0
    (event,) = events(stopped, "stopped")
    assert 0 < event["env_steps"] < STEPS
    assert load(RunFolder.open(stopped))[1]["step"] == event["env_steps"]
    resume(stopped, quiet=True)
    assert_same(final_state(stopped), final_state(whole))


def test_a_realtime_signal_ends_nothing(tmp_path):
    child = start(in_child, train, run_dir=tmp_path, **settings_of("ppo"))
    wait_for(lambda: checkpoints(tmp_path), child)
    os.kill(child.pid, signal.SIGRTMIN + 3)
    child.join(60)
    assert child.exitcode == 0
    assert load(RunFolder.open(tmp_path))[1]["step"] >= STEPS


class Hanging(IdentityEnv):
    """Answers no more from a certain step of its life on, while a file is there."""

    _life = 0

    def __init__(self, length=8, until=""):
        super().__init__(length=length)
        self._until = Path(until)

    def step(self, action):
        self._life += 1
        while self._life > 200 and self._until.exists():
            time.sleep(0.05)
        return super().step(action)


@pytest.mark.parametrize("settings", [{}, {"normalize_reward": True}], ids=["plain", "normalized"])
def test_a_run_whose_envs_do_not_answer_is_saved_when_told(settings, tmp_path, monkeypatch):
    (tmp_path / "hangs").touch()
    monkeypatch.setattr("corral.runs.training_loop._STOP_S", 0.3)
    name = f"{Path(__file__).stem}:Hanging"
    given = settings_of("ppo", env_kwargs={"until": str(tmp_path / "hangs")}, backend="local", **settings)
    timer = threading.Timer(2.0, lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM))
    timer.start()
    stopped = train(run_dir=tmp_path / "run", **given | {"env": name})
    timer.join()
    assert stopped.stopped
    assert 0 < stopped.steps < STEPS
    assert load(RunFolder.open(tmp_path / "run"))[1]["step"] == stopped.steps
    (tmp_path / "hangs").unlink()
    done = resume(tmp_path / "run", quiet=True)
    assert done.steps >= STEPS
    assert "new episodes" in events(tmp_path / "run", "resumed")[0]["text"]


def ignoring_sigint(function, *args, **kwargs):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    in_child(function, *args, **kwargs)


def test_ignored_sigint_stays_ignored(tmp_path):
    child = start(ignoring_sigint, train, run_dir=tmp_path, **settings_of("ppo"))
    wait_for(lambda: checkpoints(tmp_path), child)
    os.kill(child.pid, signal.SIGINT)
    child.join(60)
    assert child.exitcode == 0
    assert not events(tmp_path, "stopped")
    assert load(RunFolder.open(tmp_path))[1]["step"] >= STEPS


class Stopping(IdentityEnv):
    """Tells the run to stop, once, when one of its kind has lived for 90 steps."""

    told = False
    _life = 0

    def step(self, action):
        self._life += 1
        if self._life == 90 and not Stopping.told:
            Stopping.told = True  # a second time would mean: at once
            signal.raise_signal(signal.SIGTERM)
        obs, _, terminated, truncated, info = super().step(action)
        return obs, 1.0, terminated, truncated, info


def test_the_best_checkpoint_is_the_one_that_was_evaluated(tmp_path):
    changes = {"eval_every": 200, "checkpoint_every": 0, "env_kwargs": {"length": 5}}
    settings = settings_of("ppo", **changes) | {"env": f"{Path(__file__).stem}:Stopping"}
    result = train(run_dir=tmp_path, **settings)
    assert result.stopped
    assert result.steps == 384  # turns are of 64 steps
    folder = RunFolder.open(tmp_path)
    assert load(folder, "latest")[1]["step"] == 384
    assert load(folder, "best")[1]["step"] == 256


def test_the_best_checkpoint_is_of_the_reported_step(tmp_path):
    """Where every return is the same, the first evaluation is the best, and not the last one."""
    Stopping.told = True
    settings = settings_of("ppo", eval_every=128, checkpoint_every=0, env_kwargs={"length": 5})
    result = train(run_dir=tmp_path, **settings | {"env": f"{Path(__file__).stem}:Stopping"})
    assert result.best_step == load(RunFolder.open(tmp_path), "best")[1]["step"] == 128


# -- damage --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["state.safetensors", "state.json", "manifest.json"])
def test_truncated_checkpoint_falls_back_to_previous(tmp_path, name):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    settings = settings_of("a2c", eval_episodes=0, steps=1200)
    train(run_dir=whole, **settings)
    train(run_dir=cut, **(settings | {"steps": 600}))
    *_, before, last = checkpoints(cut)
    damaged = cut / "checkpoints" / last / name
    os.truncate(damaged, damaged.stat().st_size // 2)
    resume(cut, steps=1200, quiet=True)
    (event,) = events(cut, "checkpoint")
    assert last in event["text"]
    assert before in event["text"]
    assert_same(final_state(cut), final_state(whole))


def test_resume_without_checkpoints_is_refused(tmp_path):
    train(run_dir=tmp_path / "run", **settings_of("a2c", steps=200, eval_episodes=0))
    for name in checkpoints(tmp_path / "run"):
        (tmp_path / "run" / "checkpoints" / name / "state.json").unlink()
    with pytest.raises(UserError, match="has no usable checkpoint"):
        resume(tmp_path / "run", quiet=True)


def test_resume_of_finished_run_changes_nothing(tmp_path):
    train(run_dir=tmp_path / "run", **settings_of("a2c", steps=600))
    state, table = final_state(tmp_path / "run"), rows(tmp_path / "run")
    resume(tmp_path / "run", quiet=True)
    assert_same(final_state(tmp_path / "run"), state)
    assert rows(tmp_path / "run") == table


def test_more_steps_do_not_change_how_often_a_run_is_evaluated(tmp_path):
    settings = settings_of("a2c", steps=400) | {"eval_every": 0, "eval_max_fraction": 1.0, "log_every": 20}
    train(run_dir=tmp_path / "run", **settings)
    resume(tmp_path / "run", steps=800, quiet=True)
    looks = [int(row["env_steps"]) for row in rows(tmp_path / "run") if row["eval/return"]]
    assert looks == list(range(40, 801, 40))


def test_a_run_that_another_process_trains_keeps_its_settings(tmp_path):
    train(run_dir=tmp_path / "run", **settings_of("a2c", steps=100))
    before = (tmp_path / "run" / "config.yaml").read_text()
    with RunFolder.open(tmp_path / "run").lock(), pytest.raises(UserError, match="is training"):
        resume(tmp_path / "run", steps=200, quiet=True)
    assert (tmp_path / "run" / "config.yaml").read_text() == before


def test_run_too_short_to_learn_warns(tmp_path):
    for steps, said in ((60, 1), (400, 0)):
        train(run_dir=tmp_path / str(steps), **settings_of("dqn", steps=steps))
        assert len(events(tmp_path / str(steps), "not_trained")) == said


def test_no_step_has_two_rows(tmp_path):
    train(run_dir=tmp_path / "run", **settings_of("a2c", steps=600))
    steps = [int(row["env_steps"]) for row in rows(tmp_path / "run")]
    assert steps == sorted(set(steps))


# -- environments that cannot go on ---------------------------------------------------------------------------------


class Forgetful(gymnasium.Env):
    """Draws from a generator that nobody can find, so nobody can repeat what it did."""

    _numbers = itertools.count()

    def __init__(self):
        self.observation_space = spaces.Box(0, np.inf, (1,), np.float32)
        self.action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._t = 0
        return np.array([next(self._numbers)], np.float32), {}

    def step(self, action):
        self._t += 1
        return np.array([next(self._numbers)], np.float32), 1.0, False, self._t >= 30, {}


def test_resume_without_replay_is_logged(tmp_path):
    settings = settings_of("dqn", steps=200, save_replay_buffer=False)
    train(run_dir=tmp_path / "run", **settings)
    resume(tmp_path / "run", steps=400, quiet=True)
    (event,) = events(tmp_path / "run", "resumed")
    assert event["text"].endswith("; the replay buffer was not saved and starts empty")


@pytest.mark.parametrize("command", ["resume", "eval", "record"])
def test_a_run_whose_environment_has_changed_is_refused(tmp_path, capsys, command):
    from corral.cli.main import main

    train(run_dir=tmp_path / "run", **settings_of("a2c", steps=100))
    config = (tmp_path / "run" / "config.yaml").read_text()
    (tmp_path / "run" / "config.yaml").write_text(config.replace("CartPole-v1", "Acrobot-v1"))
    out = ["--out", str(tmp_path / "x.mp4")] if command == "record" else []
    assert main([command, str(tmp_path / "run"), *out]) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith("corral: Acrobot-v1 has observations Box(")
    assert said.endswith("use the environment it was trained on, or start a new run.")


def test_a_run_whose_network_has_changed_is_refused(tmp_path):
    train(run_dir=tmp_path / "run", **settings_of("a2c", steps=100))
    config = (tmp_path / "run" / "config.yaml").read_text()
    (tmp_path / "run" / "config.yaml").write_text(config.replace("[64, 64]", "[64, 32]"))
    with pytest.raises(UserError, match=r"weights do not fit the network .* restore the settings"):
        resume(tmp_path / "run", quiet=True)


def test_unrestorable_envs_start_anew_and_are_logged(tmp_path):
    settings = settings_of("a2c", eval_episodes=0, steps=400, normalize_reward=False)
    settings["env"] = f"{Path(__file__).stem}:Forgetful"
    train(run_dir=tmp_path / "run", **settings)
    result = resume(tmp_path / "run", steps=800, quiet=True)
    assert result.steps == 800
    (event,) = events(tmp_path / "run", "resumed")
    assert "environments 0, 1, 2, 3 could not be restored and start new episodes" in event["text"]


def test_a_resumed_run_keeps_the_backend_that_was_chosen_for_it(tmp_path, monkeypatch):
    settings = settings_of("ppo", backend="auto", eval_episodes=0, steps=200)
    monkeypatch.setattr(auto, "choose", lambda *args: auto.Choice("process", 2, "this is a test"))
    train(run_dir=tmp_path / "run", **settings)
    assert {k: RunFolder.open(tmp_path / "run").config[k] for k in ("backend", "workers")} == {
        "backend": "process", "workers": 2,
    }  # fmt: skip
    monkeypatch.setattr(auto, "choose", lambda *args: pytest.fail("chosen again"))
    resume(tmp_path / "run", steps=400, quiet=True)
