"""Algorithms that are given as classes."""

from dataclasses import dataclass

import pytest
from helpers.callback_runs import events

from corral.algos.a2c import A2c
from corral.algos.a2c import Config as A2cConfig
from corral.config.experiment import Experiment
from corral.core.errors import UserError
from corral.runs.evaluation.evaluate import evaluate
from corral.runs.folder import RunFolder
from corral.runs.load import load_policy
from corral.runs.train import resume, train

SMALL = {
    "steps": 64, "num_envs": 2, "backend": "local", "device": "cpu", "preset": "none", "quiet": True,
    "eval_episodes": 1, "hidden_sizes": (8,),
}  # fmt: skip


@dataclass(frozen=True)
class Config(A2cConfig):
    """A2c's settings."""


class Mine(A2c):
    """A2c under a name of its own."""


def local_class():
    class Inner(A2c):
        """A class that no name leads to."""

    return Inner


def test_a_class_that_can_be_imported_is_stored_by_name(tmp_path):
    train(Mine, "CartPole-v1", run_dir=tmp_path, **SMALL)
    assert RunFolder.open(tmp_path).algo == f"{__name__}:Mine"
    assert not events(tmp_path, "not_importable")
    assert resume(tmp_path, steps=128, quiet=True).steps >= 128
    assert evaluate(tmp_path, episodes=1).returns


def test_a_class_of_corral_is_its_name():
    assert Experiment.make(A2c, "CartPole-v1").algo == "a2c"


@pytest.mark.parametrize(
    "settings", [{}, pytest.param({"topology": "actor_learner", "actors": 2}, marks=pytest.mark.slow)]
)
def test_a_class_of_a_function_trains_with_a_warning(tmp_path, settings):
    result = train(local_class(), "CartPole-v1", run_dir=tmp_path / "run", **SMALL | settings)
    assert result.best_report > 0, "the best checkpoint was loaded, where the class is known"
    (event,) = events(tmp_path / "run", "not_importable")
    assert event["text"].startswith("only this script has the algorithm")
    with pytest.raises(UserError, match=r"algorithm of this run is <Inner>, .* write module:Class as algo"):
        load_policy(tmp_path / "run")


def test_a_class_of_a_script_is_found_within_it(tmp_path, monkeypatch):
    import __main__

    monkeypatch.setattr(Mine, "__module__", "__main__")
    monkeypatch.setattr(__main__, "Mine", Mine, raising=False)
    monkeypatch.setattr(__main__, "Config", Config, raising=False)
    train(Mine, "CartPole-v1", run_dir=tmp_path, **SMALL)
    assert RunFolder.open(tmp_path).algo == "__main__:Mine"
    assert len(events(tmp_path, "not_importable")) == 1
    assert evaluate(tmp_path, episodes=1).returns
    monkeypatch.delattr(__main__, "Mine")
    with pytest.raises(UserError, match="a class of the script that trained it: move it"):
        load_policy(tmp_path)


def test_the_default_folder_of_a_class_has_a_plain_name(tmp_path):
    assert Experiment.make(Mine, "CartPole-v1").default_run_dir(tmp_path).name == "Mine-CartPole-v1-0-1"
    assert Experiment.make(local_class(), "CartPole-v1").default_run_dir(tmp_path).name == "Inner-CartPole-v1-0-1"


def test_a_class_that_is_no_algorithm_is_refused_by_name():
    with pytest.raises(UserError, match=r"builtins:dict is not an algorithm: name a subclass"):
        Experiment.make(dict, "CartPole-v1")
