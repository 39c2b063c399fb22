"""How often a run is evaluated: within its share of the time, or beside training in a process of its own."""

import os
import signal

import numpy as np
import pytest

import corral
from corral.config.experiment import Experiment
from corral.core.errors import UserError
from corral.runs.evaluation import evaluator as evaluator_module
from corral.runs.evaluation.evaluator import Evaluator
from corral.runs.events import read_events
from corral.runs.sinks.csv import read_metrics

SMALL = {
    "num_envs": 2, "num_steps": 8, "num_minibatches": 1, "backend": "local", "preset": "none", "quiet": True,
    "checkpoint_every_s": 0, "log_every_s": 0, "eval_episodes": 2, "run_dir": None, "seed": 1,
}  # fmt: skip


def train(path, steps=320, **settings):
    return corral.train("ppo", "CartPole-v1", steps, **SMALL | {"run_dir": path} | settings)


def evaluations(path):
    """Steps -> mean return of every evaluation, from the rows of metrics."""
    columns = read_metrics(path)
    there = np.isfinite(columns["eval/return"])
    return dict(zip(columns["env_steps"][there].astype(int).tolist(), columns["eval/return"][there], strict=True))


def events(path, kind):
    return [event["text"] for event in read_events(path / "events.jsonl") if event["kind"] == kind]


class Wait(corral.Callback):
    """Waits after every update until the evaluation in the background has its result, and notes what it is told."""

    def __init__(self, before=lambda run: None):
        self.told, self._before = [], before

    def on_update(self, run, metrics):
        background = run._background
        if background is not None and background.busy:
            self._before(run)
            background._runtime.wait([background._call], 120)

    def on_evaluation(self, run, result):
        self.told.append((run.evaluated_at, result.mean))


@pytest.fixture
def nothing_is_cheap(monkeypatch):
    monkeypatch.setattr(evaluator_module, "_CHEAP_S", 0.0)


def test_slow_evaluations_are_left_out_but_not_the_last(tmp_path, nothing_is_cheap):
    result = train(tmp_path / "run", eval_max_fraction=1e-9)
    assert list(evaluations(tmp_path / "run")) == [320]
    assert result.eval_return == evaluations(tmp_path / "run")[320]
    (text,) = events(tmp_path / "run", "evaluations_left_out")
    assert text.startswith("9 evaluations left out, because they would have taken more than 1e-07 % of the time")


def test_eval_every_is_obeyed_whatever_it_costs(tmp_path, nothing_is_cheap):
    train(tmp_path / "run", eval_every=32)
    assert list(evaluations(tmp_path / "run")) == list(range(32, 321, 32))
    assert not events(tmp_path / "run", "evaluations_left_out")


def test_fast_evaluations_are_not_left_out(tmp_path):
    train(tmp_path / "run")
    assert list(evaluations(tmp_path / "run")) == list(range(32, 321, 32))


@pytest.mark.parametrize(
    ("spent_s", "last_s", "wall_s", "fits"),
    [(0, 10, 30, False), (0, 10, 40, True), (10, 10, 80, False), (100, 0.4, 0, True)],
)
def test_an_evaluation_fits_into_a_fifth_of_the_time(spent_s, last_s, wall_s, fits):
    class Topology:
        experiment = Experiment.make("ppo", "CartPole-v1")

    evaluator = Evaluator(Topology(), None)
    evaluator.spent_s, evaluator._last_s = spent_s, last_s
    assert evaluator.fits(wall_s) is fits


def test_the_first_evaluation_is_expected_to_have_whole_episodes(tmp_path):
    """HalfCheetah: 20 episodes of 1,000 steps at 6,000 steps/s take 3.3 s, not the 0.4 s of the steps so far."""

    class Topology:
        experiment = Experiment.make("ppo", "CartPole-v1", overrides={"num_envs": 8})
        spec = corral.core.types.EnvSpec(None, None, max_episode_steps=1000)
        episodes = corral.acting.episode_stats.EpisodeStats(8)
        env_steps = 1_000

    assert Evaluator(Topology(), None)._expected_s(1 / 6) == pytest.approx(20 / 6)


def test_evaluations_show_what_they_do(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("corral.runs.callbacks.progress._FIRST_LINE_S", 0.0)
    monkeypatch.setattr("corral.runs.callbacks.progress._LINE_S", 0.0)
    train(tmp_path / "run", quiet=False, eval_every=160)
    text = capfd.readouterr().err
    for line in (
        "160/320 50%  evaluating: 0 of 2 episodes, 0 steps",
        "320/320 100%  evaluating sampled actions: 2 of 2 episodes",
        "320/320 100%  evaluating the best checkpoint: 0 of 2 episodes",
    ):
        assert line in text


def test_background_evaluations_equal_those_of_the_learner(tmp_path):
    wait = Wait()
    train(tmp_path / "one", eval_every=64)
    train(tmp_path / "two", eval_every=64, eval_background=True, callbacks=[wait])
    assert evaluations(tmp_path / "two") == evaluations(tmp_path / "one")
    assert wait.told == list(evaluations(tmp_path / "one").items())


def test_best_checkpoint_holds_the_weights_evaluated_beside(tmp_path):
    best = []

    class OnlyTheFirst(Wait):
        def on_evaluation(self, run, result):
            best.append(result.mean)
            run.best_return = float("inf")

    train(tmp_path / "run", eval_every=64, eval_background=True, callbacks=[OnlyTheFirst()])
    policy = corral.load_policy(tmp_path / "run")
    assert policy.step == 64
    assert policy.evaluation["mean"] == best[0]
    assert corral.evaluate(tmp_path / "run", 2, seed=1).mean == best[0]
    assert (tmp_path / "run" / "checkpoints" / "best").readlink().name == "policy_000000064"
    assert corral.resume(tmp_path / "run", steps=384, quiet=True).steps == 384


def test_an_extra_evaluation_beside_those_is_saved_as_best(tmp_path):
    class Extra(corral.Callback):
        def on_update(self, run, metrics):
            if run.steps == 64:
                run.evaluate()
                run.best_return = float("inf")

    train(tmp_path / "run", eval_every=1000, eval_background=True, callbacks=[Extra()])
    policy = corral.load_policy(tmp_path / "run")
    assert (policy.step, policy.evaluation["step"]) == (64, 64)
    assert corral.evaluate(tmp_path / "run", 2, seed=1).mean == policy.evaluation["mean"]


def test_a_due_evaluation_is_left_out_while_one_still_runs(tmp_path):
    settings = {"mark": str(tmp_path / "mark"), "slow_in": "episode", "slow_from": 5}
    env = "tests.helpers.slow_eval_env:SlowEval"

    class Stop(corral.Callback):
        def on_update(self, run, metrics):
            if run.steps >= 256:
                run.stop("enough")

    corral.train(
        "ppo", env, 10_000, **SMALL | {"run_dir": tmp_path / "run"}, eval_every=64, eval_background=True,
        eval_env_kwargs=settings, callbacks=[Stop()],
    )  # fmt: skip
    (text,) = events(tmp_path / "run", "evaluations_left_out")
    assert "left out, because the one before was still running: set a larger eval_every" in text


def test_a_crash_of_the_evaluation_process_leaves_one_out(tmp_path):
    killed = []

    def kill(run):
        if not killed:
            killed.append(run._background._handle.pid)
            os.kill(killed[0], signal.SIGKILL)

    train(tmp_path / "run", eval_every=64, eval_background=True, callbacks=[Wait(kill)])
    (text,) = events(tmp_path / "run", "lost")
    assert "the evaluation at step 64 is left out" in text
    assert list(evaluations(tmp_path / "run")) == [128, 192, 256, 320]


def test_background_evaluation_of_simulators_is_refused():
    with pytest.raises(UserError, match=r"eval_background builds environments in another process.*: omit it\.$"):
        Experiment.make("ppo", "tcp://127.0.0.1:5555", overrides={"eval_background": True})
