"""`python -m benchmarks NAME [OPTIONS]`: find the benchmark, parse its options, and run it."""

from __future__ import annotations

import sys

from corral.cli.main import main

COMMANDS = {
    "exchange": (
        "benchmarks.exchange.command:BenchExchange",
        "seconds per update of learners that share gradients, over slow links",
    ),
    "frozen": ("benchmarks.frozen:BenchFrozen", "Corral's own figures over those of an earlier commit"),
    "learning": (
        "benchmarks.learning.command:BenchLearning",
        "train every claim of BENCHMARKS.md over several seeds, and write its table",
    ),
    "link": (
        "benchmarks.link.command:BenchLink",
        "rows per second of external simulators, beside JSON, gRPC and RLlib",
    ),
    "planning": (
        "benchmarks.planning.command:BenchPlanning",
        "return of a half-trained policy with search, and of planners without a policy",
    ),
    "replay": ("benchmarks.replay:BenchReplay", "transitions per second of prioritised replay, beside cpprb"),
    "sampling": (
        "benchmarks.sampling.command:BenchSampling",
        "environment steps per second, beside Gymnasium, SB3, EnvPool and ALE",
    ),
    "search": (
        "benchmarks.search.command:BenchSearch",
        "simulations per second of tree search, beside mctx, OpenSpiel and LightZero",
    ),
    "training": (
        "benchmarks.training.command:BenchTraining",
        "steps per second of training, beside SB3, Sample Factory and RLlib",
    ),
}
"""Name -> where its dataclass is, and what it measures."""

if __name__ == "__main__":
    sys.exit(main(None, COMMANDS, "python -m benchmarks"))
