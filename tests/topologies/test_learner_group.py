"""Several learners of one replay store."""

from corral.config.experiment import Experiment
from corral.topologies.base import make_topology

SETTINGS = {
    "steps": 2_000, "num_envs": 4, "backend": "local", "device": "cpu", "topology": "actor_learner", "actors": 1,
    "runtime": "inline", "learners": 2, "weight_sync": "sync", "learning_starts": 200, "batch_size": 32,
    "net.normalize_obs": True,
}  # fmt: skip


def test_observations_before_the_first_update_count_once():
    topology = make_topology(
        Experiment.make("dqn", "CartPole-v1", preset="none", overrides=SETTINGS), lambda kind, text: None
    )
    try:
        while topology.env_steps < 300:
            topology.advance()
        assert topology.learner.version > 0
        assert topology.learner.model.encoder.norm.count == topology.env_steps
    finally:
        topology.close()
