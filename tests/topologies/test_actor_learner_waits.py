"""How long a learner waits for its actors."""

import time
from functools import partial

import corral
from corral.testing import SlowEnv
from corral.topologies import actor_learner


def test_time_without_a_turn_is_no_wait_for_actors(tmp_path, monkeypatch):
    """An evaluation, or a callback, may take longer than actors may be silent."""
    monkeypatch.setattr(actor_learner, "_STUCK_S", 2.0)
    monkeypatch.setattr(actor_learner, "start_limit_s", lambda experiment: 2.0)

    class Rest(corral.Callback):
        def on_update(self, run, metrics):
            if run.steps == 16:
                time.sleep(3.0)

    settings = {"topology": "actor_learner", "runtime": "inline", "actors": 1, "num_envs": 1, "num_steps": 16}
    settings |= {"eval_episodes": 0, "quiet": True, "backend": "local"}
    slow = partial(SlowEnv, 0.05, 0.05)
    assert corral.train("a2c", slow, 32, 0, tmp_path, callbacks=[Rest()], **settings).steps >= 32
