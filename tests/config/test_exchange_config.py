"""An algorithm's settings for its own exchange are dropped when the user chooses another exchange."""

import pytest

from corral.config.experiment import Experiment


@pytest.mark.parametrize(
    ("algo", "given", "expected"),
    [
        ("gala", {"exchange": "param_server"}, ("param_server", "async", "exponential")),
        ("gala", {}, ("gossip", "async", "ring")),
        ("ppo-ssp", {"mode": "sync"}, ("param_server", "sync", "exponential")),
        ("ppo-ssp", {"exchange": "all_reduce"}, ("all_reduce", "sync", "exponential")),
        ("ppo-ssp", {"mode": "ssp:5"}, ("param_server", "ssp:5", "exponential")),
        ("a3c", {"exchange": "all_reduce"}, ("all_reduce", "sync", "exponential")),
        ("a3c", {"exchange": "gossip"}, ("gossip", "async", "exponential")),
    ],
)
def test_settings_of_another_exchange_are_left_out(algo, given, expected):
    made = Experiment.make(algo, "CartPole-v1", overrides=given).data_parallel
    assert (made.exchange, made.mode, made.gossip_graph) == expected
