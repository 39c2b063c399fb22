"""`python -m benchmarks NAME [OPTIONS]`: parse the options of a benchmark and run it."""

from __future__ import annotations

import sys

from corral.cli.main import main

COMMANDS = {
    "exchange": (
        "benchmarks.exchange.command:BenchExchange",
        "seconds per update of learners that exchange gradients over slow links",
    ),
    "frozen": ("benchmarks.frozen:BenchFrozen", "speed of Corral relative to an earlier commit"),
    "learning": (
        "benchmarks.learning.command:BenchLearning",
        "train every claim of BENCHMARKS.md with several seeds, and write its table",
    ),
    "link": (
        "benchmarks.link.command:BenchLink",
        "rows per second of external simulators, compared with JSON, gRPC and RLlib",
    ),
    "planning": (
        "benchmarks.planning.command:BenchPlanning",
        "return of a half-trained policy with search, and of planners without a policy",
    ),
    "replay": ("benchmarks.replay:BenchReplay", "transitions per second of prioritised replay, compared with cpprb"),
    "sampling": (
        "benchmarks.sampling.command:BenchSampling",
        "environment steps per second, compared with Gymnasium, SB3, EnvPool and ALE",
    ),
    "search": (
        "benchmarks.search.command:BenchSearch",
        "simulations per second of tree search, compared with mctx, OpenSpiel and LightZero",
    ),
    "training": (
        "benchmarks.training.command:BenchTraining",
        "steps per second of training, compared with SB3, Sample Factory and RLlib",
    ),
}
"""Name -> path of its dataclass, and what it measures."""

if __name__ == "__main__":
    sys.exit(main(None, COMMANDS, "python -m benchmarks"))
