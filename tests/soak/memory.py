"""Soak: train for a long time, and fit a line through the memory of every process. `make soak` runs it.

    python tests/soak/memory.py --minutes 30 --algo impala [--set key=value ...]

Exit code 1 when the sum grows by more than 1 MB per minute after a third of the time.
"""

import argparse
import os
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import psutil

import corral
from corral.config.overrides import split_items

BOUND_MB_PER_MIN = 1.0


def resident(processes):
    """Bytes that belong to each process alone (what it shares is not counted once per process)."""
    found = {}
    for process in processes:
        try:
            found[process.pid] = process.memory_full_info().uss
        except psutil.NoSuchProcess:
            continue
    return found


def watch(stop, rows, every_s):
    me, start = psutil.Process(), time.monotonic()
    while not stop.wait(every_s):
        sizes = resident([me, *me.children(recursive=True)])
        rows.append((time.monotonic() - start, sum(sizes.values()), len(sizes)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--algo", default="impala")
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--set", nargs="*", default=[])
    args = parser.parse_args()
    rows, stop = [], threading.Event()
    threading.Thread(target=watch, args=(stop, rows, 5.0), daemon=True).start()
    threading.Timer(60 * args.minutes, lambda: os.kill(os.getpid(), 15)).start()
    with tempfile.TemporaryDirectory() as folder:
        result = corral.train(
            args.algo, args.env, steps=10**9, seed=1, run_dir=Path(folder) / "run", quiet=True,
            **{"eval_episodes": 0, "checkpoint_every_s": 60.0} | split_items(args.set),
        )  # fmt: skip
    stop.set()
    seconds, size, count = np.array(rows).T
    late = (seconds > 20 * args.minutes) & (seconds < 60 * args.minutes - 5)  # warm, and not on its way out
    slope = np.polyfit(seconds[late] / 60, size[late] / 1e6, 1)[0]
    print(
        f"{args.algo} {' '.join(args.set)}: {result.steps:,} steps in {args.minutes:g} min, {count[late][-1]:.0f} "
        f"processes, {size[late][0] / 1e6:.0f} -> {size[late][-1] / 1e6:.0f} MB, {slope:+.2f} MB/min"
    )
    return int(slope > BOUND_MB_PER_MIN)


if __name__ == "__main__":
    sys.exit(main())
