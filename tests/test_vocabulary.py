"""Words that were replaced by the field's own do not come back as identifiers, and class names mean one thing each.

Strings are exempt: keys of checkpoints, wire fields and seeds are formats and keep their names.
"""

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "corral").rglob("*.py"))
REPLACED = {
    "anatomy": "structure",
    "apart": "separate, distance",
    "awake": "spin_wait",
    "beyond": "clip_fraction, last_values",
    "born": "reset, started",
    "brain": "bfloat16",
    "crew": "workers, supervised_role",
    "dial": "connect",
    "dialled": "connected",
    "dice": "rng",
    "die": "RngState",
    "everybody": "all",
    "everyone": "all",
    "film": "recording, video",
    "guarded": "learner_in_own_process",
    "heard": "last_seen",
    "hub": "rendezvous",
    "hubs": "rendezvous",
    "introduce": "bind_envs",
    "keeping": "keeper",
    "lay": "write, store",
    "lean": "numpy, fast",
    "lose": "mark_lost, disconnect",
    "meet": "join",
    "mishap": "failed_step",
    "mishaps": "failed_steps",
    "mistake": "client_error",
    "nobody": "none",
    "nowhere": "no_node",
    "onlooker": "passive_wrapper",
    "owe": "schedule_reset",
    "owed": "available_samples",
    "owing": "any_pending",
    "parcel": "copied_rows",
    "parcelled": "copied_rows",
    "patience": "timeout",
    "reborn": "restarted",
    "revive": "restart_if_due",
    "said": "metrics, message",
    "scene": "views",
    "seated": "used_slots",
    "seating": "slots",
    "seats": "slots",
    "sentry": "orphan_reaper",
    "shelf": "state_index",
    "sparing": "rate_limited",
    "spread": "entropy, std",
    "standing": "status",
    "strangers": "peer_log",
    "tape": "history",
    "told": "spaces, num_reported",
    "unseen": "passive",
    "vain": "failed_turns",
    "words": "message",
    "young": "is_recent",
}
ALLOWED = {  # the field's own word, and an option that the C++ SDK has too
    "corral/runs/callbacks/early_stopping.py": {"patience"},
    "corral/cli/serve.py": {"patience"},
}


def identifiers(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def words(name):
    return {word.lower() for part in name.split("_") for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", part)}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_replaced_words_do_not_come_back(path):
    names = {path.stem, *path.relative_to(ROOT).parts[:-1], *identifiers(ast.parse(path.read_text()))}
    allowed = ALLOWED.get(str(path.relative_to(ROOT)), set())
    found = {name: [REPLACED[word] for word in words(name) & REPLACED.keys() - allowed] for name in sorted(names)}
    assert not {name: instead for name, instead in found.items() if instead}
    assert not {name for name in names if re.match(r"_?MOST(_|$)", name)}, "constants are MAX_..."


def test_class_names_occur_once():
    places = defaultdict(list)
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(path.relative_to(ROOT)))
    assert not {name: where for name, where in places.items() if len(where) > 1 and name != "Config"}
