from __future__ import annotations

import pytest

from corral.algos.registry import ALGORITHMS
from corral.config.experiment import Experiment
from corral.config.overrides import leaves, read
from corral.config.presets import ATARI, all_presets, describe, find, verified
from corral.core.errors import UserError

PRESETS = all_presets()


@pytest.mark.parametrize(("algo", "name"), PRESETS)
def test_every_preset_names_settings_that_exist_and_takes_effect(algo, name):
    if name == ATARI:
        pytest.importorskip("ale_py")
    made = Experiment.make(algo, "CartPole-v1", preset=name)
    assert made.preset == name
    wanted = read(made, PRESETS[algo, name].settings)
    assert wanted
    assert set(wanted) <= set(leaves(made))
    for setting, value in wanted.items():
        found = made
        for part in setting.split("."):
            found = getattr(found, part)
        assert found == value


@pytest.mark.parametrize(("algo", "name"), PRESETS)
def test_verified_preset_has_evidence(algo, name):
    preset = PRESETS[algo, name]
    assert algo in ALGORITHMS
    assert preset.note
    if preset.status == "verified":
        for word in ("seeds", "steps", " s"):
            assert word in preset.note
    assert (name in verified(algo)) == (preset.status == "verified")


def test_minibatches_of_ppo_divide_its_batches():
    for (algo, _), preset in PRESETS.items():
        if algo == "ppo":
            batch = preset.settings["num_envs"] * preset.settings["num_steps"]
            assert batch % preset.settings["num_minibatches"] == 0


def test_a_preset_is_found_by_the_environment():
    assert find("ppo", "CartPole-v1") == "CartPole-v1"
    assert find("ppo", "ALE/Pong-v5") == find("ppo", "BreakoutNoFrameskip-v4") == ATARI
    assert find("ppo", "my_module:MyEnv") is None
    assert find("reinforce", "ALE/Pong-v5") is None


def test_a_preset_is_described_with_its_status():
    status = PRESETS["ppo", "CartPole-v1"].status
    assert describe("ppo", "CartPole-v1", 100_000) == f"preset CartPole-v1, {status}"
    assert describe("ppo", "none", 1) == "no preset"
    assert "gone-v0" in describe("ppo", "gone-v0", 1)


def test_a_preset_is_not_verified_with_fewer_steps():
    assert describe("ppo", "CartPole-v1", 200_000) == "preset CartPole-v1, verified"
    assert describe("ppo", "CartPole-v1", 99_999) == "preset CartPole-v1, untested with less than 100,000 steps"


def test_unknown_preset_suggests_another():
    with pytest.raises(UserError, match=r"no preset 'Cartpole'; did you mean CartPole-v1\?"):
        Experiment.make("ppo", "CartPole-v1", preset="Cartpole")
    with pytest.raises(UserError, match="there are CartPole-v1, none"):
        Experiment.make("reinforce", "CartPole-v1", preset="zzzz")
