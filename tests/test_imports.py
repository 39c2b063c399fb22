"""What may be imported where; the direction between packages is import-linter's, in pyproject.toml."""

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "corral"
HEAVY = {
    "torch",
    "ray",
    "ale_py",
    "envpool",
    "cv2",
    "stable_baselines3",
    "matplotlib",
    "pybullet",
    "mujoco",
    "grpc",
    "pygame",
    "pettingzoo",
}


def modules():
    return sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def imported(path, top_level_only=False):
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_level_only else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


# Parts that are torch through and through; nobody comes to them by `import corral`.
MORE_TORCH = {
    "network",
    "values",
    "exchange_peer",
    "model_policy",
    "training",
    "training_peers",
    "time_to_score",
    "counting_agent",
}
TORCH = {"ops", "nets", "algos", "learn", "topologies", "runs"}


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_heavy_packages_are_imported_only_where_they_are_used(path):
    tops = {name.split(".")[0] for name in imported(path, top_level_only=True)}
    part = path.relative_to(PACKAGE).parts[0]
    torch_too = part in TORCH or path.stem in MORE_TORCH
    assert not tops & (HEAVY - {"torch"} if torch_too else HEAVY)


def test_there_is_no_utils():
    assert not [path for path in modules() if "util" in path.stem]


def test_importing_corral_brings_in_nothing_heavy():
    code = "import corral, sys; corral.make_vec, corral.Sampler; print(sorted(set(sys.modules) & %r))" % (
        HEAVY | {"numba"}
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_public_names_are_these():
    import corral

    assert sorted(corral.__all__) == [
        "Callback", "EnvFailed", "EnvSpec", "Experiment", "MetricSink", "Policy", "RunFailed", "Sampler", "Search",
        "Snapshots", "StepBatch", "Supervision", "Trajectory", "UserError", "__version__", "envs", "evaluate",
        "load_policy", "make_vec", "plot", "record", "resume", "spaces", "testing", "train", "trust",
    ]  # fmt: skip
    assert all(getattr(corral, name) is not None for name in corral.__all__)


def dotted_strings():
    """Every `corral.something` in a string of the package: boot code, lazy imports, loggers, environments by path."""
    for path in modules():
        if path.name == "migrate.py":  # names of earlier versions
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield from re.findall(r"(?:from |import |^|\")(corral(?:\.[a-z_0-9]+)+)(?=:| import|$|\")", node.value)


FILES = {"corral.hpp", "corral.json"}


@pytest.mark.parametrize("name", sorted(set(dotted_strings()) - FILES))
def test_modules_named_in_strings_exist(name):
    assert importlib.util.find_spec(name) is not None
