"""Settings that are refused because they make no sense together."""

import pytest
import yaml

from corral.config.experiment import Experiment
from corral.config.presets import presets_of, settings
from corral.core.errors import UserError


def test_a_run_without_an_environment_or_algorithm_is_refused():
    with pytest.raises(UserError, match="ppo needs an environment"):
        Experiment.make("ppo")
    with pytest.raises(UserError, match="did you mean ppo"):
        Experiment.make("pppo", "CartPole-v1")
    with pytest.raises(UserError, match="Close: CartPole-v1"):
        Experiment.make("ppo", "CartPol-v1")
    with pytest.raises(UserError, match=r"x\.yaml must set algo"):
        Experiment.from_dict({"env": "CartPole-v1"}, "x.yaml")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"num_envs": 0}, "num_envs must be at least 1"),
        ({"eval_every": -1}, "eval_every must be at least 0"),
        ({"keep_checkpoints": 0}, "keep_checkpoints must be at least 1"),
        ({"log_every_s": -1}, "log_every_s must be at least 0"),
        ({"device": "gpu"}, "device must be auto, cpu"),
        ({"precision": "fp8"}, "precision must be auto, fp32 or bf16"),
        ({"topology": "impala"}, "topology must be sync"),
        ({"actors": 4}, "set num_envs, or topology=actor_learner"),
        ({"learning_rate": 0}, "learning_rate must be above 0"),
        ({"every_steps": 5}, "it is called eval_every or checkpoint_every or log_every now"),
        ({"env": "Acrobot-v1"}, "env is set twice"),
        ({"algo": "dqn"}, "algo is set twice, to ppo and dqn"),
    ],
)
def test_settings_that_make_no_sense_are_refused(overrides, words):
    with pytest.raises(UserError) as caught:
        Experiment.make("ppo", "CartPole-v1", overrides=overrides)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("algo", "overrides", "words"),
    [
        ("dqn", {"rnn_size": 64}, "rnn_size=64 has no effect with rnn=none"),
        ("alphazero", {"rnn_size": 64}, "rnn_size=64 has no effect"),
        ("ppo-search", {"rnn_size": 64}, "rnn_size=64 has no effect"),
        ("dqn", {"log_std_init": -1.0}, "log_std_init is for continuous actions, and dqn has none"),
        ("apex", {"log_std_init": -1.0}, "and apex has none"),
        ("alphazero", {"net.log_std_init": -1.0}, "and alphazero has none"),
        ("dqn", {"rnn": "lstm"}, "dqn does not support recurrent networks"),
    ],
)
def test_network_setting_without_effect_is_refused(algo, overrides, words, tmp_path):
    with pytest.raises(UserError, match=words):
        Experiment.make(algo, "CartPole-v1", overrides=overrides)
    (tmp_path / "f.yaml").write_text(yaml.safe_dump(overrides))
    with pytest.raises(UserError, match=words):
        Experiment.make(algo, "CartPole-v1", config_file=tmp_path / "f.yaml")


def test_earlier_run_with_a_setting_without_effect_loads():
    plain = Experiment.make("dqn", "CartPole-v1").to_dict()
    plain["algorithm"]["net"] |= {"rnn_size": 64, "log_std_init": -1.0}
    assert Experiment.from_dict(plain).algorithm.net.rnn_size == 64


def test_preset_with_a_core_can_be_used_without_it(tmp_path):
    name = next(name for name in presets_of("ppo") if settings("ppo", name).get("rnn_size"))
    made = Experiment.make("ppo", "CartPole-v1", preset=name, overrides={"rnn": "none", "env_kwargs": {}})
    assert made.algorithm.net.rnn_size != 128
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(made.to_dict()))
    assert Experiment.make("ppo", config_file=tmp_path / "config.yaml") == made
