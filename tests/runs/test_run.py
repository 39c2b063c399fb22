"""What callbacks may ask of a run, and what is refused with the callback's name."""

import errno
import io
import os

import numpy as np
import pytest
import torch

import corral
from corral.cli.main import main
from corral.runs.events import read_events
from corral.runs.sinks.csv import read_metrics

SMALL = {
    "num_envs": 4, "num_steps": 8, "num_minibatches": 1, "backend": "local", "preset": "none", "device": "cpu",
    "precision": "fp32", "quiet": True, "checkpoint_every_s": 0, "log_every_s": 0, "eval_episodes": 1,
    "eval_every": 64, "log_every": 32,
}  # fmt: skip


class Doing(corral.Callback):
    """Calls a function with the run, in one hook."""

    def __init__(self, hook, do):
        setattr(self, "do_" + hook, do)

    def _do(self, hook, run):
        getattr(self, "do_" + hook, lambda run: None)(run)

    def on_start(self, run):
        self._do("on_start", run)

    def on_rollout(self, run, trajectory):
        self._do("on_rollout", run)

    def on_update(self, run, metrics):
        self._do("on_update", run)

    def on_evaluation(self, run, result):
        self._do("on_evaluation", run)

    def on_checkpoint(self, run, path):
        self._do("on_checkpoint", run)

    def on_end(self, run):
        self._do("on_end", run)


def train(path, hook, do, **settings):
    """A short run whose callback does something in a hook; returns its result and its first reported error."""
    given = SMALL | {"steps": 128, "callbacks": [Doing(hook, do)]} | settings
    result = corral.train("ppo", "CartPole-v1", run_dir=path, **given)
    reported = [event["text"] for event in read_events(path / "events.jsonl") if event["kind"] == "callback_error"]
    return result, reported[0] if reported else ""


@pytest.mark.parametrize(
    ("hook", "method"), [("on_rollout", "save"), ("on_checkpoint", "save"), ("on_evaluation", "evaluate")]
)
def test_calls_that_a_hook_cannot_make_are_refused(tmp_path, hook, method):
    result, error = train(tmp_path / "run", hook, lambda run: getattr(run, method)())
    assert f"{method}() cannot be called in {hook}: call it in on_update." in error
    assert result.steps == 128


def test_a_refused_save_in_on_rollout_leaves_no_checkpoint(tmp_path):
    """Its steps would be counted without the rollout, which a resumed run would never learn from."""
    found = []

    def save(run):
        try:
            run.save()
        except corral.UserError:
            found.append(os.listdir(run.run_dir / "checkpoints"))

    train(tmp_path / "run", "on_rollout", save, checkpoint_every=0)
    assert found[0] == []


@pytest.mark.parametrize("value", ["x", float("nan"), float("inf"), -1, [1e-3]])
def test_a_learning_rate_that_is_no_rate_is_refused(tmp_path, value):
    def assign(run):
        run.learning_rate = value

    result, error = train(tmp_path / "run", "on_update", assign)
    assert "Doing.on_update raised " in error
    assert result.steps == 128
    assert (read_metrics(tmp_path / "run")["learn/lr"] >= 0).all()


def test_none_restores_the_learning_rate(tmp_path):
    def assign(run):
        run.learning_rate = np.float32(1e-5)
        run.learning_rate = None

    _, error = train(tmp_path / "run", "on_update", assign, learning_rate=1e-3, anneal_lr=False)
    assert not error
    assert set(read_metrics(tmp_path / "run")["learn/lr"]) == {1e-3}


@pytest.mark.parametrize(
    ("args", "words"), [((3, 2), "UserError: log takes the name of a metric"), (("mine/x", "a"), "ValueError"),
                        (("mine/x", None), "TypeError"), (("mine/x", [1, 2]), "TypeError")]
)  # fmt: skip
def test_a_logged_value_that_is_no_number_is_refused(tmp_path, args, words):
    result, error = train(tmp_path / "run", "on_update", lambda run: run.log(*args))
    assert words in error
    assert result.steps == 128
    kinds = {event["kind"] for event in read_events(tmp_path / "run/events.jsonl")}
    assert "sink_error" not in kinds


def test_tensors_and_numpy_numbers_can_be_logged(tmp_path):
    def log(run):
        run.log("mine/tensor", torch.tensor(2.0))
        run.log("mine/numpy", np.float32(3.0))

    assert not train(tmp_path / "run", "on_update", log)[1]
    assert read_metrics(tmp_path / "run")["mine/tensor"][-1] == 2.0


def test_stop_in_on_end_leaves_a_finished_run_finished(tmp_path):
    result, error = train(tmp_path / "run", "on_end", lambda run: run.stop("too late"))
    assert (result.stopped, error) == (False, "")


def test_an_error_in_on_end_does_not_say_that_the_run_continues(tmp_path):
    _, error = train(tmp_path / "run", "on_end", lambda run: 1 / 0)
    assert "Doing.on_end raised ZeroDivisionError" in error
    assert "continues" not in error


def test_a_misspelt_hook_is_named_at_the_start(tmp_path):
    class Typo(corral.Callback):
        def on_updates(self, run, metrics):
            pass

    train(tmp_path / "run", "on_end", lambda run: None, callbacks=[Typo()])
    (event,) = (event for event in read_events(tmp_path / "run/events.jsonl") if event["kind"] == "unknown_hook")
    assert "Typo.on_updates is never called: the hooks are on_start, " in event["text"]


def test_a_full_disk_ends_the_run_with_its_first_error(tmp_path, capsys, monkeypatch):
    """Neither the event of the failure nor the last counts of events can be written either."""
    open_file = io.FileIO

    def open_full(path, mode):
        return open_file("/dev/full" if os.fspath(path).endswith((".csv", ".jsonl")) else path, mode)

    monkeypatch.setattr(io, "FileIO", open_full)
    words = ["--env", "CartPole-v1", "--steps", "64", "--run-dir", str(tmp_path / "run"), "--preset", "none", "--quiet"]
    assert main(["train", "ppo", *words]) == 1
    assert capsys.readouterr().err == (
        f"corral: {tmp_path / 'run/metrics.csv'} cannot be written (No space left on device): free disk space and "
        "`corral resume` the run.\n"
    )


def test_a_disk_that_is_full_from_the_start_is_one_sentence(tmp_path, capsys, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)  # the pid in the lock
    monkeypatch.setattr(os, "fsync", full)  # config.yaml
    words = ["--env", "CartPole-v1", "--run-dir", str(tmp_path / "run"), "--preset", "none", "--quiet"]
    assert main(["train", "ppo", *words]) == 1
    assert capsys.readouterr().err == f"corral: {tmp_path / 'run'} cannot be written: No space left on device.\n"
