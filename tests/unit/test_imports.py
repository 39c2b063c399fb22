"""Which part may know which: the import rules of ARCHITECTURE.md, read from the code."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "corral"
# Each part may import itself, the parts before it in its row, and what those may.
_BASE = {"types", "spaces", "errors", "seeding", "encoding", "connection", "cores", "rpc"}
_MODELS = _BASE | {"ops", "nets"}
ALLOWED = {
    "__main__": {"cli"},
    "errors": set(),
    "cores": set(),
    "messages": set(),
    "seeding": set(),
    "spaces": {"errors"},
    "types": {"spaces", "errors"},
    "encoding": {"types"},
    "connection": {"encoding"},
    "rpc": {"errors"},
    "ops": _BASE,
    "nets": _BASE | {"ops"},
    "link": _BASE,
    "envs": _BASE | {"link"},
    "simulators": _BASE | {"link", "envs"},
    "states": _BASE | {"link"},
    "planning": _MODELS | {"acting", "envs", "link"},
    "data": _BASE | {"ops"},
    "acting": _MODELS | {"envs"},
    "algos": _MODELS | {"acting", "envs", "planning"},
    "learn": _MODELS | {"algos", "sharing"},
    "overrides": {"errors"},
    "presets": {"errors", "envs"},
    "sharing": {"errors", "learn"},
    "experiment": _BASE | {"algos", "envs", "overrides", "presets", "sharing"},
    "runtimes": _BASE | {"envs"},
    "topologies": _MODELS | {"acting", "algos", "data", "envs", "experiment", "learn", "runtimes", "sharing"},
    "runs": _MODELS
    | {"acting", "algos", "data", "envs", "experiment", "learn", "overrides", "planning", "presets", "runtimes",
       "topologies"},
    "training": {"errors", "envs", "experiment", "runs"},
    "testing": _MODELS | {"link", "envs", "acting", "algos", "data", "planning"},
    "bench": _MODELS | {"acting", "algos", "data", "envs", "experiment", "learn", "link", "planning", "presets", "runs",
                        "sharing", "simulators", "testing", "topologies", "training"},
    "cli": _BASE | {"acting", "algos", "bench", "envs", "experiment", "link", "overrides", "presets", "runs",
                    "simulators", "states", "testing", "training"},
}  # fmt: skip
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


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_parts_import_only_what_they_may(path):
    part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    for name in imported(path):
        if name.startswith("corral."):
            other = name.split(".")[1]
            if other in ALLOWED:
                assert other == part or other in ALLOWED[part], f"{path.name} imports {name}"


# Parts that are torch through and through; nobody comes to them by `import corral`.
MORE_TORCH = {
    "network",
    "values",
    "exchange_peer",
    "model_policy",
    "training",
    "training_peers",
    "time_to_score",
    "counting",
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
        "EnvFailed", "EnvSpec", "Experiment", "Policy", "RunFailed", "Sampler", "Search", "Snapshots", "StepBatch",
        "Supervision", "Trajectory", "UserError", "__version__", "envs", "load_policy", "make_vec", "resume",
        "spaces", "testing", "train",
    ]  # fmt: skip
    assert all(getattr(corral, name) is not None for name in corral.__all__)
