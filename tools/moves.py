"""The reorganisation of the tree: which module of commit 205a88e went where.

`python tools/moves.py` lists what is not in its place yet. `python tools/moves.py --rewrite` in a checkout of an older
branch moves its modules and rewrites imports and paths in every text file; modules that were merged afterwards arrive
under a name of their own beside the module that they belong to.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
# new module <- old modules, below corral/; the first old one is moved to the new name, the others are merged into it.
TABLE = """
core/types <- types
core/spaces <- spaces
core/seeding <- seeding
core/errors <- errors
core/log <- messages, link/sparing
core/encoding <- encoding
core/jit <- compiled
core/machine <- cores, data/memory
core/gym_env <- envs/build, envs/legal, envs/onlooker, envs/keeping/unseen

runtimes/base <- runtimes/contract
runtimes/process <- runtimes/process, runtimes/frames
runtimes/ray_cluster <- envs/ray_cluster
runtimes/orphan_reaper <- envs/sentry
runtimes/connection <- connection
runtimes/supervised_role <- topologies/crew

link/protocol <- link/protocol, link/limits
link/auth <- link/proofs
link/transports/base <- link/binding
link/transports/open <- link/opening
link/transports/tcp <- link/tcp, link/awake
link/transports/zmq <- link/zmq
link/transports/grpc <- link/grpc, rpc
link/transports/json_router <- link/json_loop
link/transports/json_client <- link/json_peer
link/transports/json_values <- link/json_values
link/client/fleet <- link/fleet
link/client/session <- link/session
link/client/states <- link/states, planning/link_asking

snapshot/keeper <- envs/keeping/contract
snapshot/live_env <- envs/keeping/acting, envs/keeping/watched
snapshot/rng <- envs/generators, envs/keeping/dice, envs/keeping/common_dice
snapshot/find_rng <- envs/keeping/hidden_dice
snapshot/states <- planning/states, planning/mishaps
snapshot/env_states <- planning/env_states, simulators/states
snapshot/array_states <- planning/row_states, planning/game_states, planning/shelf
snapshot/keepers/choose <- envs/keeping/choose
snapshot/keepers/fields <- envs/keeping/fields
snapshot/keepers/replay <- envs/keeping/replay
snapshot/keepers/deepcopy <- envs/keeping/copier, envs/keeping/bindings
snapshot/keepers/declared <- envs/keeping/declared, envs/declared
snapshot/keepers/bullet <- envs/keeping/bullet
snapshot/keepers/ale <- envs/keeping/ale, envs/keeping/mt19937
snapshot/keepers/mujoco <- envs/keeping/mujoco, envs/keeping/mujoco_model
snapshot/store/base <- states/contract, states/budget, states/memory
snapshot/store/open <- states/opening
snapshot/store/files <- states/files
snapshot/store/client <- states/client, states/wire
snapshot/store/server <- states/server

envs/vec_env <- envs/contract
envs/supervision <- envs/supervise
envs/as_gymnasium <- envs/as_gymnasium, envs/reset_seeds
envs/stepping/group <- envs/group, envs/keeping/row_env
envs/stepping/rows <- envs/rows, envs/row_parcel
envs/stepping/in_flight <- envs/flight
envs/stepping/id_set <- envs/id_set
envs/stepping/pending_faults <- envs/losses
envs/stepping/recorder <- envs/restore
envs/backends/local <- envs/local
envs/backends/lockstep <- envs/lockstep
envs/backends/vector <- envs/vector
envs/backends/remote/vec_env <- envs/remote, envs/remote_worker
envs/backends/remote/worker <- envs/env_worker
envs/backends/process/vec_env <- envs/process, envs/worker_handle
envs/backends/process/child <- envs/worker
envs/backends/process/channel <- envs/channel
envs/backends/ray/vec_env <- envs/ray_vec, envs/parcelled, envs/ray_worker
envs/backends/ray/actor <- envs/ray_actor
envs/backends/native/choose <- envs/native
envs/backends/native/ale <- envs/native_ale
envs/backends/native/envpool <- envs/native_envpool
envs/backends/simulators/vec_env <- envs/link_vec
envs/backends/simulators/options <- envs/external
envs/backends/simulators/slots <- envs/seating, envs/patience
envs/backends/simulators/replies <- envs/link_answers
envs/backends/simulators/launcher <- envs/launcher
envs/backends/simulators/states <- planning/link_states
envs/serve/server <- simulators/server
envs/serve/slots <- simulators/hosted, simulators/blobs
envs/suites/games/board_env <- envs/suites/games/board_env, envs/suites/games/draw, envs/suites/games/sides
envs/suites/games/players <- envs/suites/games/player, envs/suites/games/perfect
envs/suites/games/pettingzoo <- envs/suites/games/pettingzoo, planning/aec_states

ops/returns <- ops/gae, ops/nstep, ops/lambda_return, ops/scan, ops/outcome, ops/vtrace
ops/distributions <- ops/actions, ops/joint
ops/optim <- algos/optim
nets/numpy_mlp <- nets/lean
data/store <- data/store
data/rate_limiter <- data/limiter
data/fifo <- data/once
data/transition_replay <- data/replay
data/game_replay <- data/outcomes
data/transition_ring <- data/rows
data/frame_ring <- data/frames
acting/rollout_buffer <- acting/assemble
acting/episode_stats <- acting/episodes

planning/snapshots <- planning/snapshot
planning/action_set <- planning/action_set, planning/mcts/priors
planning/planner <- planning/planner, planning/evaluator, planning/reward_scale
planning/shooting <- planning/shooting, planning/mppi, planning/values
planning/search_player <- planning/search_player, planning/arena
planning/mcts/selection <- planning/mcts/selection, planning/mcts/puct
planning/mcts/tree <- planning/mcts/expansion, planning/mcts/backup, planning/mcts/reuse
planning/mcts/evaluation <- planning/mcts/evaluation, planning/mcts/rollouts

algos/base <- algos/contract, algos/settings
algos/trajectories <- algos/rollout, algos/corrected
algos/search/ppo_search <- algos/ppo_search
algos/search/search_acting <- algos/search_behaviour
algos/search/alphazero <- algos/alphazero
algos/search/self_play <- algos/self_play
learn/weights <- learn/flat, learn/state
learn/device <- learn/precision, learn/threads
learn/fast <- algos/explicit, ops/surrogate
learn/exchange/base <- learn/exchange/contract, learn/exchange/local
learn/exchange/config <- sharing
learn/exchange/param_server_process <- learn/exchange/server
learn/exchange/all_reduce <- learn/exchange/all_reduce, learn/exchange/hooks
learn/exchange/gossip <- learn/exchange/gossip, learn/exchange/graph
learn/exchange/peers <- learn/exchange/dial
learn/exchange/compress <- learn/compress/choose, learn/compress/codecs, learn/compress/feedback
config/experiment <- experiment
config/overrides <- overrides
config/presets <- presets
topologies/base <- topologies/contract, topologies/build
topologies/weight_channel <- topologies/weights
topologies/replay_shards <- topologies/shards
topologies/learner_group <- topologies/learners
topologies/rendezvous <- topologies/hubs, topologies/servers

runs/train <- training, runs/guard
runs/training_loop <- runs/session
runs/sinks/csv <- runs/metrics
runs/callbacks/progress <- runs/progress
runs/folder <- runs/folder, runs/whole_file, runs/same_env
runs/evaluate <- runs/evaluate, runs/solved
runs/export/file <- runs/export
runs/export/heads <- runs/export_heads
runs/views/plot <- runs/plot
runs/views/top <- runs/top
runs/views/video <- runs/video
testing/tasks <- testing/hybrid, testing/hybrid_walk, testing/stateless
testing/counting_agent <- testing/counting
testing/play <- testing/play, testing/random_play
testing/contracts/vec_env <- testing/contract
testing/contracts/supervision <- testing/supervision
testing/contracts/store <- testing/store
testing/contracts/states <- testing/states_contract
testing/checks/checker <- testing/checker
testing/checks/env <- testing/env_checks
testing/checks/states <- testing/state_checks, testing/state_run
testing/checks/link <- testing/link_checks
cli/list <- cli/list_algos, cli/list_envs, cli/list_presets
cli/doctor <- cli/doctor, cli/machine
cli/options <- cli/parse, cli/env_kwargs
cli/console <- cli/console, cli/table
"""

# Modules that were merged into the first of their line arrive beside it under their own name, but for these.
BESIDE = {
    "envs/declared": "snapshot/keepers/declared_env",
    "simulators/states": "envs/serve/states",
    "planning/game_states": "planning/game_states",
    "planning/aec_states": "planning/aec_states",
    "algos/explicit": "algos/explicit",
    "ops/surrogate": "ops/surrogate",
}
LEFT_ALONE = ("tests/golden/old_runs/", "tests/golden/frozen.py", "tools/moves.py", "CHANGELOG.md", "sdk/vectors/")


def places() -> dict[str, str]:
    """Old module -> new module, as paths below corral/."""
    found: dict[str, str] = {}
    for line in TABLE.split("\n"):
        if line:
            new, olds = line.split(" <- ")
            for position, old in enumerate(olds.split(", ")):
                beside = f"{new.rpartition('/')[0]}/{old.rpartition('/')[2]}"
                found[old] = BESIDE.get(old, new if position == 0 else beside)
    return {old: new for old, new in found.items() if old != new}


def not_moved() -> list[str]:
    """Old modules that are still there, and new ones that are missing."""
    news = {line.split(" <- ")[0] for line in TABLE.split("\n") if line}
    left = [f"corral/{old}.py is still there" for old in places() if old not in news and _path(old).exists()]
    beside = [
        f"corral/{new}.py is not merged yet" for new in places().values() if new not in news and _path(new).exists()
    ]
    return left + beside + [f"corral/{new}.py is missing" for new in sorted(news) if not _path(new).exists()]


def rewrite() -> None:
    """Move every module, then rewrite imports and paths in every text file that git knows."""
    moved = places()
    for old, new in moved.items():
        if _path(old).exists():
            _path(new).parent.mkdir(parents=True, exist_ok=True)
            _git("mv", f"corral/{old}.py", f"corral/{new}.py")
    for folder in {_path(new).parent for new in moved.values()}:
        for package in (folder, *folder.parents):
            if (
                package != ROOT / "corral"
                and package.is_relative_to(ROOT / "corral")
                and not (package / "__init__.py").exists()
            ):
                (package / "__init__.py").write_text('"""."""\n')
                _git("add", str(package / "__init__.py"))
    dotted = {_dotted(old): _dotted(new) for old, new in moved.items()}
    by_name = re.compile(r"\b(" + "|".join(re.escape(name) for name in sorted(dotted, key=len, reverse=True)) + r")\b")
    slashed = {f"corral/{old}.py": f"corral/{new}.py" for old, new in moved.items()}
    by_path = re.compile("|".join(re.escape(name) for name in sorted(slashed, key=len, reverse=True)))
    for name in _git("ls-files").splitlines():
        path = ROOT / name
        if (
            name.startswith(LEFT_ALONE)
            or path.suffix not in {".py", ".md", ".toml", ".yaml", ".cpp", ".hpp", ""}
            or path.is_symlink()
        ):
            continue
        before = path.read_text()
        text = _from_imports(before, dotted) if path.suffix == ".py" else before
        text = by_path.sub(lambda match: slashed[match[0]], by_name.sub(lambda match: dotted[match[0]], text))
        if text != before:
            path.write_text(text)


def _from_imports(text: str, dotted: dict[str, str]) -> str:
    """`from package import module` of modules that moved, one line each."""

    def line(match: re.Match[str]) -> str:
        indent, package, names = match.groups()
        kept, lines = [], []
        for part in names.strip("()\n ").split(","):
            name, _, alias = part.strip().partition(" as ")
            new = dotted.get(f"{package}.{name}")
            if not name:
                continue
            if new is None:
                kept.append(part.strip())
                continue
            where, _, stem = new.rpartition(".")
            shown = alias or name
            lines.append(f"{indent}from {where} import {stem}" + ("" if shown == stem else f" as {shown}"))
        if not lines:
            return match[0]
        if kept:
            lines.insert(0, f"{indent}from {package} import {', '.join(kept)}")
        return "\n".join(lines)

    return re.sub(r"^( *)from (corral[\w.]*) import (\([^)]*\)|[^(\n]+)$", line, text, flags=re.MULTILINE)


def _dotted(module: str) -> str:
    return "corral." + module.replace("/", ".")


def _path(module: str) -> Path:
    return ROOT / "corral" / f"{module}.py"


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def main() -> int:
    """List, or rewrite."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rewrite", action="store_true", help="move the modules of an older branch")
    if parser.parse_args().rewrite:
        rewrite()
        return 0
    left = not_moved()
    print("\n".join(left) if left else "Every module is in its place.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
