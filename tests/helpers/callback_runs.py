"""Short runs with callbacks and sinks, and what these wrote."""

import json

import corral
from corral.runs.events import read_events

SMALL = {
    "num_envs": 4, "num_steps": 8, "num_minibatches": 1, "backend": "local", "preset": "none", "device": "cpu",
    "precision": "fp32", "quiet": True, "checkpoint_every_s": 0, "log_every_s": 0,
}  # fmt: skip
CLOCKS = {
    "eval_episodes": 1,
    "eval_every": 256,
    "checkpoint_every": 256,
    "log_every": 64,
}
GUARDED = {"topology": "actor_learner", "actors": 1, "runtime": "process"}


def train(path, steps=512, algo="ppo", **settings):
    return corral.train(algo, "CartPole-v1", steps=steps, seed=0, run_dir=path, **SMALL | CLOCKS | settings)


def hooks(path):
    return [json.loads(line) for line in (path / "hooks.jsonl").read_text().splitlines()]


def named(path, hook):
    return [line for line in hooks(path) if line["hook"] == hook]


def events(path, kind):
    return [event for event in read_events(path / "events.jsonl") if event["kind"] == kind]
