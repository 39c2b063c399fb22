"""Callbacks and sinks of a run, in the process of the caller and in the learner's own process."""

import multiprocessing
import os
import re
import signal
import threading
import time

import numpy as np
import pytest
from helpers.callback_runs import CLOCKS, GUARDED, SMALL, events, hooks, named, train
from helpers.callbacks import Blocking, Lines, Raising, RaisingAndEnding, Recorder, Rows, Stopping

import corral
from corral.cli.main import main
from corral.core.errors import RunFailed, UserError
from corral.runs.callbacks import slow_calls
from corral.runs.folder import RunFolder
from corral.runs.sinks.csv import read_metrics

# -- hooks -------------------------------------------------------------------------------------------------------------


def test_hooks_are_called_in_order(tmp_path):
    train(tmp_path / "run", callbacks=[Recorder()])
    found = hooks(tmp_path / "run")
    assert (found[0]["hook"], found[-1]["hook"]) == ("on_start", "on_end")
    rollouts, updates = named(tmp_path / "run", "on_rollout"), named(tmp_path / "run", "on_update")
    assert [line["steps"] for line in rollouts] == [line["steps"] for line in updates] == list(range(32, 513, 32))
    assert rollouts[0]["shape"] == [8, 4]
    assert {"loss/policy", "loss/value", "loss/entropy"} <= set(updates[0]["metrics"])
    evaluations, saves = named(tmp_path / "run", "on_evaluation"), named(tmp_path / "run", "on_checkpoint")
    assert [line["steps"] for line in evaluations] == [256, 512]
    assert all(line["mean"] == line["known"] for line in evaluations)
    assert [line["steps"] for line in saves] == [256, 512]
    assert all(line["whole"] for line in saves)
    assert {line["pid"] for line in found} == {os.getpid()}


def test_logged_metrics_are_means_since_the_last_row(tmp_path):
    train(tmp_path / "run", callbacks=[Recorder()])
    found = read_metrics(tmp_path / "run")
    assert found["env_steps"].tolist() == list(range(64, 513, 64))
    assert found["mine/value"].tolist() == [steps - 16 for steps in range(64, 513, 64)]


class RowsOfItsOwn(corral.Callback):
    """Writes a row after every update, before the run evaluates."""

    def on_update(self, run, metrics):
        run.write_metrics()


def evaluations_in(columns):
    there = ~np.isnan(columns["eval/return"])
    return list(zip(columns["env_steps"][there].tolist(), columns["eval/return"][there].tolist(), strict=True))


def test_every_evaluation_is_a_row_at_its_own_step(tmp_path):
    sink = Rows()
    given = {"callbacks": [RowsOfItsOwn(), Recorder()], "sinks": [sink], "eval_every": 128, "log_every": 256}
    train(tmp_path / "run", **given)
    expected = [(line["steps"], line["mean"]) for line in named(tmp_path / "run", "on_evaluation")]
    assert [step for step, _ in expected] == [128, 256, 384, 512]
    assert evaluations_in(read_metrics(tmp_path / "run")) == expected
    assert [(step, row["eval/return"]) for step, row in sink.rows if "eval/return" in row] == expected


def test_an_evaluation_is_a_row_even_if_no_row_is_due(tmp_path):
    train(tmp_path / "run", eval_every=128, log_every=0)
    assert read_metrics(tmp_path / "run")["env_steps"].tolist() == [128, 256, 384, 512]


def test_the_row_of_an_evaluation_precedes_its_checkpoint(tmp_path):
    """A run that is resumed from the checkpoint has the row."""

    seen = []

    class Saving(corral.Callback):
        def on_evaluation(self, run, result):
            run.save()
            seen.append(evaluations_in(read_metrics(run.run_dir))[-1] == (run.steps, result.mean))

    train(tmp_path / "run", callbacks=[Saving()])
    assert seen == [True, True]


def test_values_logged_after_the_last_row_are_written(tmp_path):
    class Late(corral.Callback):
        def on_update(self, run, metrics):
            run.write_metrics()
            run.log("mine/late", run.steps)

    train(tmp_path / "run", callbacks=[Late()], eval_episodes=0)
    assert read_metrics(tmp_path / "run")["mine/late"][-1] == 512


def test_metrics_of_a_run_are_those_of_its_last_update(tmp_path):
    metrics = []

    class OnEvaluation(corral.Callback):
        def on_evaluation(self, run, result):
            metrics.append(dict(run.metrics))

    train(tmp_path / "a", callbacks=[OnEvaluation()], log_every=0)
    train(tmp_path / "b", log_every=32)  # a row after every update
    rows = read_metrics(tmp_path / "b")
    for at, seen in zip((7, 15), metrics, strict=True):
        for name in ("loss/policy", "loss/grad_norm", "train/return", "train/episodes", "learn/version", "eval/return"):
            assert seen[name] == rows[name][at]


def test_callbacks_do_not_change_the_weights(tmp_path):
    plain, watched = train(tmp_path / "a"), train(tmp_path / "b", callbacks=[Recorder()], sinks=["csv"])
    assert (plain.steps, plain.version, plain.eval_return) == (watched.steps, watched.version, watched.eval_return)
    files = [tmp_path / name / "checkpoints/latest/policy.safetensors" for name in "ab"]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_on_update_without_updates_needs_every_iteration(tmp_path):
    calls = []

    class Plain(corral.Callback):
        def on_update(self, run, metrics):
            calls.append((type(self).__name__, bool(metrics)))

    class Often(Plain):
        every_iteration = True

    settings = {"learning_starts": 64, "train_frequency": 4, "num_steps": None, "num_minibatches": None}
    given = {k: v for k, v in (SMALL | CLOCKS | settings).items() if v is not None}
    corral.train("dqn", "CartPole-v1", steps=96, run_dir=tmp_path / "run", callbacks=[Plain(), Often()], **given)
    assert ("Often", False) in calls
    assert ("Often", True) in calls
    assert ("Plain", True) in calls
    assert ("Plain", False) not in calls


def test_reserved_metric_names_are_refused(tmp_path):
    class Clash(corral.Callback):
        def on_start(self, run):
            run.log("wall_s", 1.0)

    train(tmp_path / "run", callbacks=[Clash()])
    (event,) = events(tmp_path / "run", "callback_error")
    assert "wall_s is written by the run itself" in event["text"]


def test_learning_rate_can_be_set(tmp_path):
    class Halving(corral.Callback):
        def on_evaluation(self, run, result):
            run.learning_rate = run.learning_rate / 2

    train(tmp_path / "run", callbacks=[Halving()], learning_rate=1e-3, anneal_lr=False)
    assert read_metrics(tmp_path / "run")["learn/lr"].tolist() == [1e-3] * 3 + [5e-4] * 4 + [2.5e-4]


@pytest.mark.parametrize("settings", [{}, GUARDED | {"runtime": "inline"}], ids=["sync", "actor_learner"])
def test_learning_rate_that_was_set_survives_a_resume(settings, tmp_path):
    class Lower(corral.Callback):
        def on_start(self, run):
            run.learning_rate = 1e-5

    train(tmp_path / "run", callbacks=[Lower()], learning_rate=1e-3, **settings)
    corral.resume(tmp_path / "run", steps=768, quiet=True)
    assert set(read_metrics(tmp_path / "run")["learn/lr"].tolist()) == {1e-5}
    corral.resume(tmp_path / "run", steps=1024, quiet=True, learning_rate=2e-4, anneal_lr=False)
    assert read_metrics(tmp_path / "run")["learn/lr"][-1] == 2e-4, "a changed setting ends what a callback had set"


def test_a_resumed_run_calls_on_start_again(tmp_path):
    train(tmp_path / "run", callbacks=[Stopping()])
    corral.resume(tmp_path / "run", steps=1024, callbacks=[Recorder], quiet=True)
    assert named(tmp_path / "run", "on_start")[0]["steps"] == 512
    assert named(tmp_path / "run", "on_end")[0]["steps"] == 1024


def test_data_parallel_has_no_rollouts_and_says_so(tmp_path):
    settings = {"topology": "data_parallel", "actors": 2, "runtime": "inline", "algo": "ppo"}
    train(tmp_path / "run", callbacks=[Recorder()], **settings)
    assert not named(tmp_path / "run", "on_rollout")
    assert named(tmp_path / "run", "on_update")
    (event,) = events(tmp_path / "run", "no_rollouts")
    assert "data_parallel" in event["text"]


# -- stopping ----------------------------------------------------------------------------------------------------------


def test_a_callback_stops_the_run(tmp_path):
    result = train(tmp_path / "run", steps=1024, callbacks=[Stopping()])
    assert (result.stopped, result.steps) == (True, 512)
    (event,) = events(tmp_path / "run", "stopped")
    assert (event["text"], event["env_steps"]) == ("500 steps are enough", 512)
    corral.resume(tmp_path / "run", quiet=True)
    train(tmp_path / "whole", steps=1024)
    files = [tmp_path / name / "checkpoints/latest/policy.safetensors" for name in ("run", "whole")]
    assert files[0].read_bytes() == files[1].read_bytes()


# -- errors ------------------------------------------------------------------------------------------------------------


def test_an_error_is_reported_once_and_counted(tmp_path):
    result = train(tmp_path / "run", callbacks=[Raising(), Recorder()])
    assert result.steps == 512
    first, last = events(tmp_path / "run", "callback_error")
    assert "callback Raising.on_update raised ValueError: no such thing" in first["text"]
    assert "callbacks.py:" in first["text"]
    assert last["text"] == "callback Raising.on_update raised 16 times"
    assert len(named(tmp_path / "run", "on_update")) == 16


def test_an_error_ends_the_run_by_choice(tmp_path):
    with pytest.raises(RunFailed, match=r"RaisingAndEnding.on_update raised ValueError: no such thing"):
        train(tmp_path / "run", callbacks=[RaisingAndEnding(), Recorder()])
    (event,) = events(tmp_path / "run", "failed")
    assert "RaisingAndEnding" in event["text"]
    assert [line["hook"] for line in hooks(tmp_path / "run")] == ["on_start", "on_rollout", "on_end"]


def test_a_slow_callback_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(slow_calls, "SLOW_S", 0.2)

    class Slow(corral.Callback):
        def on_start(self, run):
            time.sleep(1.0)

    train(tmp_path / "run", steps=64, callbacks=[Slow()])
    (event,) = events(tmp_path / "run", "slow_callback")
    assert "Slow.on_start has been running for 0.2 s; the run waits for it" in event["text"]
    assert not [thread for thread in threading.enumerate() if thread.name == "corral-slow-calls"]


def test_a_slow_sink_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(slow_calls, "SLOW_S", 0.2)

    class Slow(Rows):
        def write(self, step, values):
            time.sleep(0 if self.rows else 1.0)
            super().write(step, values)

    train(tmp_path / "run", steps=64, sinks=[Slow()])
    (event,) = events(tmp_path / "run", "slow_sink")
    assert "Slow.write has been running for 0.2 s; the run waits for it" in event["text"]
    assert not [thread for thread in threading.enumerate() if thread.name == "corral-slow-calls"]


def test_a_call_within_a_slow_callback_leaves_it_watched(tmp_path, monkeypatch):
    monkeypatch.setattr(slow_calls, "SLOW_S", 0.2)

    class Slow(corral.Callback):
        def on_start(self, run):
            run.write_metrics()  # calls the sinks
            time.sleep(1.0)

    train(tmp_path / "run", steps=64, callbacks=[Slow()])
    (event,) = events(tmp_path / "run", "slow_callback")
    assert "callback" in event["text"]
    assert "Slow.on_start" in event["text"]


def _block(path, settings):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored, as with nohup
    train(path, callbacks=[Blocking()], **settings)


@pytest.mark.parametrize(
    "settings", [pytest.param({}, id="caller", marks=pytest.mark.slow), pytest.param(GUARDED, id="own-process")]
)
def test_two_ctrl_c_end_a_run_whose_callback_blocks(tmp_path, settings):
    context = multiprocessing.get_context("forkserver")  # has imported torch already, which takes seconds
    context.set_forkserver_preload(["corral.runs.train", "corral.runs.training_loop", "corral.algos.ppo"])
    child = context.Process(target=_block, args=(tmp_path / "run", settings))
    child.start()
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "run/blocked").exists():
            assert child.is_alive()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(child.pid, signal.SIGINT)
        child.join(1.0)
        assert child.is_alive()  # it waits for the callback
        os.kill(child.pid, signal.SIGINT)
        child.join(30)
        assert child.exitcode not in (None, 0)
    finally:
        child.kill()
        child.join()
    assert RunFolder.open(tmp_path / "run").holder() is None


# -- where they run ---------------------------------------------------------------------------------------------------


def test_callbacks_run_in_the_process_of_a_guarded_learner(tmp_path):
    given = [Recorder, Recorder(), "helpers.callbacks:Recorder"]
    result = train(tmp_path / "run", steps=256, callbacks=given, sinks=[Lines(tmp_path / "rows.jsonl")], **GUARDED)
    assert result.steps >= 256
    found = hooks(tmp_path / "run")
    assert [line["hook"] for line in (*found[:3], *found[-3:])] == ["on_start"] * 3 + ["on_end"] * 3
    assert {"on_rollout", "on_update", "on_evaluation", "on_checkpoint"} <= {line["hook"] for line in found}
    (pid,) = {line["pid"] for line in found}
    assert pid != os.getpid()
    assert (tmp_path / "rows.jsonl").exists()


def test_a_guarded_run_ends_by_its_callback(tmp_path):
    result = train(tmp_path / "stopped", steps=10_000, callbacks=[Stopping()], **GUARDED)
    assert (result.stopped, result.steps < 1000) == (True, True)
    with pytest.raises(RunFailed, match="RaisingAndEnding"):
        train(tmp_path / "failed", callbacks=[RaisingAndEnding()], **GUARDED)
    assert events(tmp_path / "failed", "failed")


class Dying(corral.Callback):
    """Kills its process once."""

    def on_update(self, run, metrics):
        if run.steps >= 256 and not (run.run_dir / "died").exists():
            (run.run_dir / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_lost_learner_is_named_with_its_step(tmp_path, caplog):
    assert train(tmp_path / "run", callbacks=[Dying()], **GUARDED).steps == 512
    (lost,) = events(tmp_path / "run", "lost")
    assert lost["text"].startswith("learner was lost: its process ended with ")
    assert lost["text"] in caplog.text
    assert lost["env_steps"] >= 192  # of the last row


def test_what_cannot_be_sent_to_a_guarded_learner_is_refused(tmp_path):
    callback = Recorder()
    callback.lock = threading.Lock()
    with pytest.raises(UserError, match="Recorder cannot be sent to the learner process"):
        train(tmp_path / "run", callbacks=[callback], **GUARDED)
    assert not (tmp_path / "run").exists()


def test_callbacks_and_sinks_from_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    small = ["--preset", "none", "--num-envs", "2", "--set", "num_steps=8", "eval_episodes=1", "--quiet"]
    plugins = ["--callback", "helpers.callbacks:Recorder", "--callback", "helpers.callbacks:Stopping",
               "--sink", "csv", "--sink", "helpers.callbacks:Lines"]  # fmt: skip
    words = ["train", "ppo", "--env", "CartPole-v1", "--steps", "10000", "--run-dir", "run", *small, *plugins]
    assert main(words) == 0
    assert re.search(r"stopped after 512 steps in .* s: 500 steps are enough\n", capsys.readouterr().out)
    assert (tmp_path / "rows.jsonl").exists()
    assert not list((tmp_path / "run").glob("events.out.tfevents.*"))
    assert len(named(tmp_path / "run", "on_end")) == 1
    assert main(["resume", "run", "--quiet", "--callback", "helpers.callbacks:RaisingAndEnding"]) == 1
    told = "corral: callback RaisingAndEnding.on_update raised ValueError: no such thing"
    assert capsys.readouterr().err.startswith(told)
    assert main(["resume", "run", "--callback", "nothing"]) == 2
