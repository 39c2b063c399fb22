"""Parts of a run are killed at random moments; it still reaches its score, and leaves nothing behind."""

import os
import random

import pytest

from corral.runs.events import count_events

pytestmark = pytest.mark.faults


@pytest.mark.parametrize(
    ("algo", "options", "words", "victims"),
    [
        ("impala", (200_000,), (), ("actor 0", "actor 0")),
        ("impala", (200_000,), (), ("learner", "learner")),
        ("impala", (200_000,), ("--learners", "2"), ("learner 1",)),
        ("seed_impala", (200_000,), (), ("inference",)),
        ("apex", (100_000, "replay_shards=2"), (), ("replay 1",)),
    ],
    ids=["an actor", "the learner", "a learner beside the first", "the inference server", "a replay shard"],
)
def test_a_run_survives_the_death_of(start, algo, options, words, victims):
    run = start(algo, *options, words=words)
    rng = random.Random(os.getpid())
    for killed, name in enumerate(victims, 1):
        target = run.steps() + rng.randint(3_000, 15_000)
        run.wait_for(lambda target=target: run.steps() >= target and (run.path / "parts.json").exists())
        victim = run.kill(name)
        run.wait_for(lambda killed=killed: count_events(run.path / "events.jsonl")["lost"] >= killed)
        run.wait_for(lambda name=name, victim=victim: run.pid_of(name) not in (None, victim))
    assert run.finish() >= 450
