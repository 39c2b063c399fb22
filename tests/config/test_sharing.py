"""Change one word: what an algorithm sets for its own exchange does not get in the way of another."""

import pytest

from corral.config.experiment import Experiment


@pytest.mark.parametrize(
    ("algo", "said", "expected"),
    [
        ("gala", {"exchange": "param_server"}, ("param_server", "async", 0, "exponential")),
        ("gala", {}, ("gossip", "async", 0, "ring")),
        ("ppo-ssp", {"mode": "sync"}, ("param_server", "sync", 0, "exponential")),
        ("ppo-ssp", {"exchange": "all_reduce"}, ("all_reduce", "sync", 0, "exponential")),
        ("ppo-ssp", {"lag": "5"}, ("param_server", "lag", 5, "exponential")),
        ("a3c", {"exchange": "all_reduce"}, ("all_reduce", "sync", 0, "exponential")),
        ("a3c", {"exchange": "gossip"}, ("gossip", "async", 0, "exponential")),
    ],
)
def test_settings_of_another_exchange_are_left_out(algo, said, expected):
    made = Experiment.make(algo, "CartPole-v1", overrides=said).sharing
    assert (made.exchange, made.mode, made.lag, made.graph) == expected
