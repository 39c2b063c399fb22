"""`make frozen`: today's code beside the code of an earlier commit, on this machine, bit for bit.

Each case of `TRAINED` is trained by a git worktree of its commit and by this tree, from the `config.yaml` that the
earlier code wrote, and the weights are compared. Each run of `old_runs/` with the topology `sync` is resumed for
`RESUMED_STEPS` more by both. A change that is meant to alter the weights of some cases moves the commit of those
cases alone, in a commit of its own that says why.

The last bits depend on the processor, so this compares two trees on one machine instead of keeping the bits; CI keeps
tolerant statistics in `weights.json`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml
from safetensors.numpy import load_file

ROOT = Path(__file__).parents[2]
OLD_RUNS = Path(__file__).with_name("old_runs")
FROZEN = "205a88e"
"""The last commit before the tree was reorganised."""
RESUMED_STEPS = 500
TOWERS = 1e-5
"""Relative difference allowed where small networks learn in NumPy since then: other sums, the same numbers."""
RESUMED_TOLERANCE = {"reinforce": TOWERS, "ppo_search": TOWERS, "alphazero_tictactoe": TOWERS}
"""Old runs that need not resume bit for bit, and the relative difference that is allowed."""
TIMEOUT_S = 300


class Case(NamedTuple):
    """A run of a few hundred steps; `settings` have the names that its commit uses."""

    algo: str
    env: str
    settings: dict[str, Any]
    commit: str = FROZEN
    steps: int = 600
    tolerance: float = 0.0
    """Relative difference of the weights that is allowed; 0: none, not a bit."""


TRAINED = {
    "ppo": Case("ppo", "CartPole-v1", {"length": 16, "normalize_obs": True}),
    "ppo-schedules": Case("ppo", "CartPole-v1", {"length": 16, "anneal_lr": True, "anneal_clip": True,
                                                 "clip_value": 0.2, "target_kl": 0.02, "normalize_reward": True}),
    "ppo-lstm": Case("ppo", "CartPole-v1", {"length": 16, "core": "lstm", "core_size": 8}),
    "ppo-box": Case("ppo", "Pendulum-v1", {"length": 16}),
    "ppo-hybrid": Case("ppo", "corral.testing.hybrid:MoveOrShoot", {"length": 16}),
    "ppo-multi-discrete": Case("ppo", "corral.testing.envs:IdentityEnv",
                               {"length": 16, "env_kwargs": {"kind": "multi_discrete"}}),
    "ppo-process": Case("ppo", "CartPole-v1", {"length": 16, "backend": "process", "workers": 2}),
    "ppo-pixels": Case("ppo", "corral.envs.suites:pixels", {
        "env_kwargs": {"env": "CartPole-v1", "size": 36, "stack": 2}, "length": 8, "num_envs": 4, "precision": "fp32"},
        steps=128),
    "a2c": Case("a2c", "CartPole-v1", {}),
    "a2c-gru": Case("a2c", "CartPole-v1", {"core": "gru", "core_size": 8, "entropy": 0.01}),
    "reinforce": Case("reinforce", "CartPole-v1", {"algorithm.episodes": 4}, tolerance=TOWERS),
    "impala": Case("impala", "CartPole-v1", {"topology": "sync", "length": 8, "batch_size": 8, "replayed": 0.5,
                                             "replay_capacity": 20}),
    "impala-uncorrected": Case("impala", "CartPole-v1", {"topology": "sync", "length": 8, "batch_size": 8,
                                                         "correction": "none"}),
    "appo": Case("appo", "CartPole-v1", {"topology": "sync", "length": 16, "batch_size": 8, "minibatches": 2}),
    "dqn": Case("dqn", "CartPole-v1", {"learning_starts": 100, "prioritised": True, "n_step": 2}),
    "dqn-plain": Case("dqn", "CartPole-v1", {"learning_starts": 100, "double": False, "target_every": 20}),
    "apex": Case("apex", "CartPole-v1", {"topology": "sync", "learning_starts": 100}),
    "ppo-search": Case("ppo-search", "CartPole-v1", {"length": 16, "sims": 8, "num_envs": 4}, steps=256,
                       tolerance=TOWERS),
    "ppo-search-expert": Case("ppo-search", "CartPole-v1", {"length": 16, "sims": 8, "num_envs": 4, "mode": "expert"},
                              steps=256, tolerance=TOWERS),
    "alphazero": Case("alphazero", "corral/TicTacToe-v0", {"num_envs": 8, "sims": 8, "batch_size": 32,
                                                           "learning_starts": 100}, steps=512, tolerance=TOWERS),
}  # fmt: skip

_TRAIN = """
import sys, corral
algo, config, run_dir, root = sys.argv[1:]
assert corral.__file__.startswith(root), corral.__file__
corral.train(algo, config_file=config, run_dir=run_dir, quiet=True)
"""
_RESUME = """
import sys, corral
run_dir, steps, root = sys.argv[1:]
assert corral.__file__.startswith(root), corral.__file__
corral.resume(run_dir, steps=int(steps), quiet=True)
"""


def run_code(tree: Path, code: str, *arguments: object) -> None:
    """Run `code` in a new interpreter that imports the `corral` of `tree`."""
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    command = [sys.executable, "-c", code, *map(str, arguments), str(tree)]
    done = subprocess.run(command, env=environment, cwd=tree, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode:
        raise SystemExit(f"{tree}: {' '.join(map(str, arguments))} failed\n{done.stderr}")


class Worktrees:
    """One git worktree per commit, removed at the end."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._trees: dict[str, Path] = {}

    def of(self, commit: str) -> Path:
        if commit not in self._trees:
            tree = self._folder / f"tree_{commit}"
            self._git("worktree", "add", "--detach", str(tree), commit)
            self._trees[commit] = tree
        return self._trees[commit]

    def close(self) -> None:
        for tree in self._trees.values():
            self._git("worktree", "remove", "--force", str(tree))

    def _git(self, *words: str) -> None:
        subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True)


def weights(run_dir: Path) -> dict[str, np.ndarray]:
    return load_file(run_dir / "checkpoints" / "latest" / "policy.safetensors")


def difference(old: Path, new: Path) -> float:
    """Largest relative difference of two runs' weights: 0.0 where every bit is the same."""
    first, second = weights(old), weights(new)
    if first.keys() != second.keys():
        raise SystemExit(f"weights have other names: {sorted(first.keys() ^ second.keys())}")
    if all(first[name].tobytes() == second[name].tobytes() for name in first):
        return 0.0
    a, b = (np.concatenate([one[name].astype(np.float64).ravel() for name in sorted(first)]) for one in (first, second))
    return max(float(np.linalg.norm(a - b) / np.linalg.norm(a)), np.finfo(np.float64).tiny)


def compare_trained(name: str, trees: Worktrees, folder: Path) -> float:
    """Train one case in both trees."""
    case = TRAINED[name]
    settings = {"algo": case.algo, "env": case.env, "steps": case.steps, "seed": 5, "device": "cpu", "threads": 1,
                "preset": "none", "checkpoints": {"every_s": 0.0}, "log": {"every_s": 0.0, "every_steps": 100},
                "evaluation": {"episodes": 0}}  # fmt: skip
    if "backend" not in case.settings:
        settings["backend"] = "local"
    given, old, new = folder / f"{name}.yaml", folder / f"{name}_old", folder / f"{name}_new"
    given.write_text(yaml.safe_dump(settings | case.settings))
    run_code(trees.of(case.commit), _TRAIN, case.algo, given, old)
    run_code(ROOT, _TRAIN, case.algo, old / "config.yaml", new)
    return difference(old, new)


def compare_resumed(name: str, trees: Worktrees, folder: Path) -> float:
    """Resume one old run in both trees."""
    steps = yaml.safe_load((OLD_RUNS / name / "config.yaml").read_text())["steps"] + RESUMED_STEPS
    old, new = folder / f"resumed_{name}_old", folder / f"resumed_{name}_new"
    for copy, tree in ((old, trees.of(FROZEN)), (new, ROOT)):
        shutil.copytree(OLD_RUNS / name, copy, symlinks=True)
        run_code(tree, _RESUME, copy, steps)
    return difference(old, new)


def sync_runs() -> list[str]:
    configs = {path.parent.name: yaml.safe_load(path.read_text()) for path in OLD_RUNS.glob("*/config.yaml")}
    return sorted(name for name, config in configs.items() if config["topology"] == "sync")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("only", nargs="*", help="names of cases and old runs; all of them by default")
    only = parser.parse_args().only
    failed = 0
    with tempfile.TemporaryDirectory(prefix="corral_frozen_") as folder:
        trees = Worktrees(Path(folder))
        try:
            work = [(name, compare_trained, TRAINED[name].tolerance) for name in TRAINED]
            work += [(name, compare_resumed, RESUMED_TOLERANCE.get(name, 0.0)) for name in sync_runs()]
            for name, compare, tolerance in work:
                if only and name not in only:
                    continue
                found = compare(name, trees, Path(folder))
                verdict = "equal" if found == 0 else f"differs by {found:.1e}"
                if found > tolerance:
                    failed += 1
                    verdict += f", allowed {tolerance:.0e}"
                print(f"{'resumed ' if compare is compare_resumed else 'trained '}{name:24} {verdict}", flush=True)
        finally:
            trees.close()
    print(f"{failed} differ" if failed else "all equal")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
