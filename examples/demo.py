"""Train PPO on CartPole, then evaluate it, plot its learning curve and record a video; everything goes to runs/demo.

Usage: python examples/demo.py [--steps N]
"""

import argparse
from pathlib import Path

import corral
from corral.cli.main import main as command

RUN = Path("runs/demo")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    args = parser.parse_args()

    result = corral.train("ppo", "CartPole-v1", steps=args.steps, seed=1, run_dir=RUN, overwrite=True)
    print(f"\nTrained for {result.steps:,} steps in {result.wall_s:.0f} s.", flush=True)

    curve, video = RUN / "curve.png", RUN / "agent.mp4"
    for words in (["eval", RUN], ["plot", RUN, "-o", curve], ["record", RUN, "-o", video]):
        print(f"\n$ corral {' '.join(map(str, words))}", flush=True)
        if code := command([str(word) for word in words]):
            raise SystemExit(code)

    policy = corral.load_policy(RUN)
    print(f"\nAction for an upright pole: {policy([0.0, 0.0, 0.0, 0.0])}")
    print(f"See {curve} and {video}; `corral train --help` shows how to train your own.")


if __name__ == "__main__":
    main()
