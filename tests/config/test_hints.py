"""Names of other libraries, and what is written here instead."""

import pytest

from corral.config.experiment import Experiment
from corral.config.hints import _ELSEWHERE, _OTHERWISE
from corral.config.overrides import leaves
from corral.core.errors import UserError

ALGOS = ("ppo", "a2c", "dqn", "impala", "appo", "reinforce", "alphazero")


@pytest.mark.parametrize(
    ("algo", "key", "words"),
    [
        ("ppo", "num_workers", "set workers, the number of processes that step the num_envs environments"),
        ("ppo", "num_env_runners", "with topology=actor_learner, actors."),
        ("ppo", "num_envs_per_worker", "set num_envs"),
        ("ppo", "num_gpus", "set device=cuda"),
        ("ppo", "train_batch_size", "a batch has num_envs * num_steps steps"),
        ("dqn", "train_batch_size", "it is called batch_size here."),
        ("ppo", "rollout_fragment_length", "it is called num_steps here."),
        ("ppo", "num_sgd_iter", "it is called update_epochs here."),
        ("ppo", "sgd_minibatch_size", "set num_minibatches."),
        ("ppo", "batch_size", "set num_minibatches."),
        ("a2c", "batch_size", "set num_envs or num_steps."),
        ("dqn", "minibatch_size", "it is called batch_size here."),
        ("ppo", "clip_param", "it is called clip_coef here."),
        ("ppo", "env_config", "it is called env_kwargs here."),
        ("ppo", "use_lstm", "set rnn=lstm."),
        ("ppo", "tensorboard_log", "it is the argument run_dir here."),
        ("ppo", "callback", "it is the argument callbacks here."),
        ("ppo", "lr", "it is called learning_rate now."),
    ],
)
def test_names_of_other_libraries_are_explained(algo, key, words):
    with pytest.raises(UserError) as caught:
        Experiment.make(algo, "CartPole-v1", overrides={key: 1})
    assert str(caught.value).startswith(f"No setting {key!r}; ")
    assert words in str(caught.value)


def test_every_hint_leads_to_something_that_exists():
    known = {name.rpartition(".")[2] for algo in ALGOS for name in leaves(Experiment.make(algo, "CartPole-v1"))}
    known |= {"run_dir", "callbacks", "sinks", "quiet"}
    assert set(_ELSEWHERE.values()) <= known
    assert {needs for found in _OTHERWISE.values() for needs in found} <= known
