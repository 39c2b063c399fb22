"""Sample CartPole with a hand-written policy, many environments at once, and say how it went.

Usage: python examples/demo.py [--num-envs N] [--seconds S]
"""

import argparse
import time

import numpy as np

import corral


def balance(obs: np.ndarray) -> np.ndarray:
    """Push towards the side the pole is falling to."""
    return (obs[:, 2] + 0.5 * obs[:, 3] + 0.05 * obs[:, 0] + 0.1 * obs[:, 1] > 0).astype(np.int64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-envs", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=5.0)
    args = parser.parse_args()
    with corral.Sampler("CartPole-v1", balance, num_envs=args.num_envs, seed=1) as sampler:
        steps, start = 0, time.perf_counter()
        for traj in sampler.rollouts(steps=128):
            steps += traj.reward.size
            elapsed = time.perf_counter() - start
            episodes = sampler.episodes
            print(
                f"{steps:>9,} steps  {steps / elapsed:>9,.0f} steps/s  {episodes.finished:>5} episodes  "
                f"mean return {episodes.mean_return():6.1f}"
            )
            if elapsed > args.seconds:
                break
    print(f"\nCartPole-v1: mean return {episodes.mean_return():.1f} of 500 over the last 100 episodes, "
          f"{steps / elapsed:,.0f} steps/s with {args.num_envs} environments.")  # fmt: skip


if __name__ == "__main__":
    main()
