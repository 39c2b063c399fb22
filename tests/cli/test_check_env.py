from __future__ import annotations

import warnings

import gymnasium
import pytest
from helpers.faulty_envs import Good

from corral.core.errors import UserError
from corral.testing.checks.checker import check_env

CHECKS = [
    "build", "spaces", "reset", "step", "observations", "rewards", "episode ends", "own buffers",
    "determinism", "seeds", "worker process", "speed", "save and load", "wrappers", "planning",
    "random numbers", "state cost",
]  # fmt: skip


def results(env, **options):
    return {r.name: r for r in check_env(env, steps=options.pop("steps", 60), **options)}


@pytest.mark.parametrize("env", ["CartPole-v1", "helpers.faulty_envs:Good", Good, lambda: Good(length=3)])
def test_a_good_environment_passes_every_check(env):
    found = results(env)
    assert list(found) == CHECKS
    assert {r.status for r in found.values()} == {"pass"}, found


@pytest.mark.parametrize(
    ("env", "check", "status", "words"),
    [
        ("OldStep", "step", "fail", "got a tuple of 4"),
        ("OldReset", "reset", "fail", "must return (obs, info)"),
        ("NoSeed", "reset", "fail", "unexpected keyword argument 'seed'"),
        ("Wordy", "spaces", "fail", "Text spaces"),
        ("NotBuilt", "build", "fail", "RuntimeError: cannot find the simulator"),
        ("not_an_env", "build", "fail", "not a gymnasium.Env"),
        ("Raising", "step", "fail", "at step 6, ValueError: the joint exploded"),
        ("OutOfRange", "observations", "fail", "at step 5"),
        ("WrongShape", "observations", "fail", "has shape (2,), its space says (3,)"),
        ("WrongDtype", "observations", "warn", "dtype float64, its space says float32"),
        ("NotFinite", "observations", "fail", "at step 4, observation leaf 'value' is not finite"),
        ("NoReward", "rewards", "fail", "the reward is None"),
        ("ArrayReward", "rewards", "warn", "array of shape (1,)"),
        ("InfiniteReward", "rewards", "fail", "the reward is inf"),
        ("Endless", "episode ends", "warn", "may never end"),
        ("Truncating", "episode ends", "pass", "0 terminated, 8 truncated, after 7 steps"),
        ("OneBuffer", "own buffers", "warn", "return a copy"),
        ("Unseeded", "determinism", "fail", "differ in the first observation"),
        ("Leftover", "determinism", "warn", "does not reset the whole state"),
        ("Reseeding", "seeds", "warn", "starts every episode alike"),
        ("Fixed", "seeds", "pass", "the seed changes nothing"),
        ("Homesick", "worker process", "warn", "behaves differently in a worker process"),
        ("Good", "save and load", "pass", "level 2, kept in memory; bit-equal"),
        ("Good", "state cost", "pass", "kB per state, "),
        ("NotFinite", "save and load", "fail", "a step from a saved state fails"),
        ("Locked", "save and load", "pass", "level 1, restored by replaying"),
        ("Forgetful", "save and load", "fail", "level 4, bytes, as the environment declares them; but a step"),
        ("Meddling", "planning", "fail", "share state of this process"),
    ],
)
def test_each_fault_is_found_by_its_check_and_named(env, check, status, words):
    found = results(f"helpers.faulty_envs:{env}")
    assert found[check].status == status, found
    assert words in found[check].detail
    foundations = ("build", "spaces", "reset", "step")
    if status == "fail" and check in foundations:
        assert list(found)[-1] == check, "later checks make no sense"
    elif status == "warn":
        assert "fail" not in {r.status for r in found.values()}, found


def test_the_place_in_the_users_file_is_named():
    detail = results("helpers.faulty_envs:Raising")["step"].detail
    assert "faulty_envs.py:" in detail
    assert "in step" in detail


def test_a_declared_lack_of_determinism_is_a_warning():
    gymnasium.register("corral_test/Chaos-v0", entry_point="helpers.faulty_envs:Unseeded", nondeterministic=True)
    try:
        found = results("corral_test/Chaos-v0")
    finally:
        del gymnasium.registry["corral_test/Chaos-v0"]
    assert found["determinism"].status == "warn"
    assert found["worker process"].detail == "runs in a worker process"


def test_unpicklable_env_is_a_warning_with_remedy():
    lock = __import__("threading").Lock()

    def factory():
        assert lock is not None
        return Good()

    found = results(factory)["worker process"]
    assert found.status == "warn"
    assert "backend='local'" in found.detail


def test_env_kwargs_reach_the_environment():
    found = results("helpers.faulty_envs:Good", env_kwargs={"length": 11})
    assert "after 11 steps" in found["episode ends"].detail


@pytest.mark.parametrize(
    ("env", "options", "words"),
    [
        ("CartPol-v1", {}, "CartPole-v1"),
        ("no_such_module:Env", {}, "cannot be imported"),
        ("helpers.faulty_envs:Goood", {}, "close: Good"),
        ("helpers.faulty_envs:Good", {"env_kwargs": {"speed": 1}}, "does not accept the keyword argument 'speed'"),
        ("helpers.faulty_envs:Good", {"steps": 0}, "at least 1"),
        ("helpers.faulty_envs:Good", {"seed": -1}, "not be negative"),
        (Good(), {}, "pass a function that creates one"),
    ],
)
def test_bad_input_is_a_user_error(env, options, words):
    with pytest.raises(UserError, match=words.replace("(", r"\(")) as caught:
        check_env(env, **options)
    assert "\n" not in str(caught.value)


def test_what_swig_warns_of_is_not_the_environments_fault():
    def make():
        warnings.warn("builtin type SwigPyPacked has no __module__ attribute", DeprecationWarning, stacklevel=1)
        warnings.warn("the floor is slippery", stacklevel=1)
        return Good()

    (found,) = [each for each in check_env(make, steps=10) if each.name == "its warnings"]
    assert found.detail == "the floor is slippery"
