"""Parts of a run are killed at random moments; it still reaches its score, and leaves nothing behind."""

import os
import random

import pytest

from corral.runs.events import count_events

pytestmark = pytest.mark.faults
_TWO = ("--actors", "2")


@pytest.mark.parametrize(
    ("algo", "options", "words", "victims"),
    [
        ("impala", (200_000,), (), ("actor 0", "actor 0")),
        ("impala", (200_000,), (), ("learner", "learner")),
        ("impala", (200_000,), ("--learners", "2"), ("learner 1",)),
        ("seed_impala", (200_000,), (), ("inference",)),
        ("apex", (100_000, "replay_shards=2"), (), ("replay 1",)),
        ("dppo", (200_000,), _TWO, ("worker 1", "worker 0")),
        ("dppo", (200_000, "exchange=param_server"), _TWO, ("worker 0", "server 0")),
        ("ppo-ssp", (200_000,), _TWO, ("worker 1", "server 0")),
        ("a3c", (400_000,), _TWO, ("worker 0", "server 0")),
        ("gala", (400_000, "mode=sync"), _TWO, ("worker 1",)),
        ("gala", (400_000,), _TWO, ("worker 0", "learner")),
    ],
    ids=[
        "an actor", "the learner", "a learner beside the first", "the inference server", "a replay shard",
        "workers that reduce", "a worker and the server in step", "a worker and the server with a lag",
        "a worker and the server that nobody waits for", "a worker that gossips in step",
        "a worker that gossips and who directs them",
    ],
)  # fmt: skip
def test_a_run_survives_the_death_of(start, algo, options, words, victims):
    run = start(algo, *options, words=words)
    rng = random.Random(os.getpid())
    for killed, name in enumerate(victims, 1):
        target = run.steps() + rng.randint(3_000, 15_000)
        run.wait_for(lambda target=target: run.steps() >= target and (run.path / "processes.json").exists())
        victim = run.kill(name)
        run.wait_for(lambda killed=killed: count_events(run.path / "events.jsonl")["lost"] >= killed)
        run.wait_for(lambda name=name, victim=victim: run.pid_of(name) not in (None, victim))
    assert run.finish() >= 450
