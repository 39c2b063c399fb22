"""Early stopping by evaluations."""

import pytest
from helpers.callback_runs import events, train

import corral
from corral.runs.callbacks.early_stopping import EarlyStopping
from corral.runs.evaluation.evaluate import Evaluation


class Evaluated:
    """A run whose evaluations have these means."""

    def __init__(self, *means):
        self.means, self.reason = means, None

    def stop(self, reason):
        self.reason = reason

    def stopped_at(self, callback):
        for k, mean in enumerate(self.means):
            callback.on_evaluation(self, Evaluation((mean,), (1,)))
            if self.reason is not None:
                return k
        return None


@pytest.mark.parametrize(
    ("options", "means", "stops_at"),
    [
        ({"target": 10}, (1, 9.9, 10, 11), 2),
        ({"target": 10}, (1, 2, 3), None),
        ({"patience": 2}, (1, 3, 2, 3, 4), 3),
        ({"patience": 2}, (1, 2, 1, 3, 1, 4), None),
        ({"target": 10, "patience": 1}, (5, 4, 10), 1),
        ({"patience": None}, (3, 2, 1, 0), None),
    ],
)
def test_early_stopping(options, means, stops_at):
    assert Evaluated(*means).stopped_at(EarlyStopping(**options)) == stops_at


def test_early_stopping_ends_a_run_at_its_target(tmp_path):
    result = train(tmp_path / "run", steps=10_000, callbacks=[EarlyStopping(target=1.0)])
    assert (result.steps, result.stopped) == (256, True)
    assert events(tmp_path / "run", "stopped")[0]["text"].startswith("mean return")


@pytest.mark.parametrize("stop_at", [384, 640])
def test_early_stopping_continues_to_count_after_a_resume(tmp_path, stop_at):
    """On a task where every return is the same, the first evaluation is the best."""

    class StopOnce(corral.Callback):
        def on_update(self, run, metrics):
            if run.steps == stop_at:
                run.stop("to resume")

    settings = {"env_kwargs": {"max_episode_steps": 5}, "eval_every": 128}
    stopped = train(tmp_path / "run", 10_000, callbacks=[EarlyStopping(patience=5), StopOnce()], **settings)
    assert stopped.steps == stop_at
    result = corral.resume(tmp_path / "run", callbacks=[EarlyStopping(patience=5)], quiet=True)
    assert (result.steps, result.stopped) == (6 * 128, True)
    assert events(tmp_path / "run", "stopped")[-1]["text"] == "no evaluation above 5 for 5 evaluations"
