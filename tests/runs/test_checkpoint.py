"""Checkpoints: which are kept, damage, formats, full disks and kills."""

import json
import logging
import os
import random
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from helpers.checkpoints import names, same

from corral.core.errors import UserError
from corral.runs.checkpoints import checkpoint
from corral.runs.checkpoints.checkpoint import POLICY, BrokenCheckpoint, load, load_checkpoint, save


def test_meta_comes_back_with_the_step(run):
    meta = {"score": float("-inf"), "eval": {"returns": [1.0, 2.5], "pair": (1, 2)}, "n": None}
    save(run, {}, 77, meta, keep=1)
    assert load(run)[1] == meta | {"step": 77}
    with pytest.raises(UserError, match="cannot hold weights"):
        save(run, {}, 78, {"weights": np.zeros(1)}, keep=1)


def test_the_last_ones_and_the_best_are_kept(run):
    for step in range(1, 7):
        save(run, {"step": step}, step, {}, keep=2, best=step in (2, 3))
    assert names(run) == ["best", "latest", "step_000000003", "step_000000005", "step_000000006"]
    assert load(run)[0] == {"step": 6}
    assert load(run, "best")[0] == {"step": 3}
    assert load(run, "step_000000005")[0] == {"step": 5}


def test_checkpoint_of_same_step_replaces_when_complete(run):
    save(run, {"x": 1}, 5, {}, keep=2, best=True)
    for x in (2, 3, 4):
        save(run, {"x": x}, 5, {}, keep=2)
    assert names(run) == ["best", "latest", "step_000000005", "step_000000005_4"]
    assert (load(run)[0], load(run, "best")[0]) == ({"x": 4}, {"x": 1})


def test_steps_beyond_a_million_million_stay_in_order(run):
    for step in (999_999_999, 1_000_000_000, 2_000_000_000_000):
        save(run, {"step": step}, step, {}, keep=2)
    (run.checkpoints / "latest").unlink()
    assert load(run)[0] == {"step": 2_000_000_000_000}
    assert len(names(run)) == 2


def test_checkpoints_after_resumed_step_are_removed(run):
    for step in (1, 2, 3):
        save(run, {"step": step}, step, {}, keep=5)
    damage_half(run.checkpoints / "step_000000003")
    assert load(run)[0] == {"step": 2}
    save(run, {"step": "2b"}, 2, {}, keep=5)
    assert names(run) == ["latest", "step_000000001", "step_000000002_2"]
    assert load(run)[0] == {"step": "2b"}


def damage_half(path):
    file = path / "state.safetensors"
    os.truncate(file, file.stat().st_size // 2)


def damage_byte(path):
    data = bytearray((path / "state.safetensors").read_bytes())
    data[-3] ^= 1
    (path / "state.safetensors").write_bytes(data)


def damage_json(path):
    text = (path / "state.json").read_text()
    (path / "state.json").write_text(text.replace("x", "y", 1))


def damage_manifest(path):
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"step": 999}))


def cut_manifest(path):
    os.truncate(path / "manifest.json", 40)


def empty_manifest(path):
    (path / "manifest.json").write_text("[]")


def no_arrays(path):
    (path / "state.safetensors").unlink()


def no_json(path):
    (path / "state.json").unlink()


def no_manifest(path):
    (path / "manifest.json").unlink()


DAMAGES = [
    damage_half, damage_byte, damage_json, damage_manifest, cut_manifest, empty_manifest, no_arrays, no_json,
    no_manifest,
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_broken_checkpoint_falls_back_to_previous(run, damage, caplog):
    for step in (1, 2, 3):
        save(run, {"step": step, "x": np.arange(10 * step)}, step, {}, keep=3)
    damage(run.checkpoints / "step_000000003")
    notes = []
    with caplog.at_level(logging.WARNING):
        state, meta = load(run, note=notes.append)
    assert (state["step"], meta["step"]) == (2, 2)
    assert len(notes) == 1
    assert "step_000000003" in notes[0]
    assert "step_000000002 is used instead" in notes[0]
    assert caplog.messages == notes
    with pytest.raises(BrokenCheckpoint, match="use another one"):
        load_checkpoint(run.checkpoints / "step_000000003")
    damage(run.checkpoints / "step_000000002")
    assert load(run)[0]["step"] == 1
    damage(run.checkpoints / "step_000000001")
    with pytest.raises(UserError, match=r"has no usable checkpoint; .*step_000000003"):
        load(run)


def test_a_broken_best_falls_back_to_the_one_before_it(run):
    for step in (1, 2, 3):
        save(run, {"step": step}, step, {}, keep=5, best=step == 2)
    no_arrays(run.checkpoints / "step_000000002")
    assert load(run, "best")[0] == {"step": 1}


def test_missing_checkpoints_are_an_error(run):
    with pytest.raises(UserError, match="no checkpoint yet"):
        load(run)
    save(run, {}, 1, {}, keep=1)
    for which in ("best", "step_000000009", "nonsense"):
        with pytest.raises(UserError, match=f"no checkpoint '{which}'"):
            load(run, which)


def test_a_link_that_was_lost_or_points_nowhere_is_no_loss(run):
    for step in (1, 2):
        save(run, {"step": step}, step, {}, keep=2)
    (run.checkpoints / "latest").unlink()
    assert load(run)[0] == {"step": 2}
    (run.checkpoints / "latest").symlink_to("step_000000003")
    assert load(run)[0] == {"step": 2}


def test_newer_checkpoint_format_asks_for_upgrade(run, monkeypatch):
    save(run, {"step": 1}, 1, {}, keep=2)
    monkeypatch.setattr(checkpoint, "FORMAT", 2)
    save(run, {"step": 2}, 2, {}, keep=2)
    monkeypatch.setattr(checkpoint, "FORMAT", 1)
    with pytest.raises(UserError, match=r"newer version of Corral \(checkpoint format 2.*upgrade"):
        load(run)


def test_an_older_format_is_migrated_step_by_step(run, monkeypatch):
    save(run, {"x": 1}, 1, {}, keep=1)
    monkeypatch.setattr(checkpoint, "FORMAT", 3)
    monkeypatch.setitem(checkpoint._MIGRATIONS, 1, lambda state, meta: ({"y": state["x"]}, meta | {"a": 1}))
    monkeypatch.setitem(checkpoint._MIGRATIONS, 2, lambda state, meta: ({"z": state["y"]}, meta))
    assert load(run) == ({"z": 1}, {"a": 1, "step": 1})


def test_reader_follows_removed_checkpoint(run, monkeypatch):
    save(run, {"step": 1}, 1, {}, keep=1)
    real = checkpoint.load_checkpoint

    def meanwhile(path, only):
        if path.name == "step_000000001":
            save(run, {"step": 2}, 2, {}, keep=1)
        return real(path, only)

    monkeypatch.setattr(checkpoint, "load_checkpoint", meanwhile)
    notes = []
    assert load(run, note=notes.append)[0] == {"step": 2}
    assert notes == []


def whole_state(step, replay=100):
    """As a session saves it, in miniature."""
    network = {"weight": torch.full((3,), float(step)), "bias": torch.zeros(2)}
    store = None if replay is None else {"rows": np.arange(replay), "high": replay}
    return {"trainer": {"learner": {"model": network, "version": step}, "store": store, "env_steps": step}}


def test_a_policy_is_read_without_the_rest(run):
    save(run, whole_state(1), 1, {"a": 1}, keep=2)
    path = save(run, whole_state(2), 2, {"a": 2}, keep=2)
    assert same(load(run)[0], whole_state(2))
    for name in ("state.safetensors", "state.json", "replay.safetensors", "replay.json"):
        (path / name).unlink()
    network, meta = load(run, only=POLICY)
    assert same(network, whole_state(2)["trainer"]["learner"]["model"])
    assert meta == {"a": 2, "step": 2}
    assert load(run)[0]["trainer"]["env_steps"] == 1


def test_a_policy_that_was_changed_is_noticed(run):
    save(run, whole_state(1), 1, {}, keep=2)
    path = save(run, whole_state(2), 2, {}, keep=2)
    data = bytearray((path / "policy.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "policy.safetensors").write_bytes(data)
    assert load(run, only=POLICY)[1]["step"] == load(run)[1]["step"] == 1


LARGE = 200_000


def test_only_the_newest_checkpoint_keeps_a_large_replay(run):
    for step in range(1, 5):
        save(run, whole_state(step, LARGE), step, {}, keep=3, best=step == 1)
        assert len(list(run.checkpoints.glob("step_*/replay.safetensors"))) == 1
        assert same(load(run)[0], whole_state(step, LARGE))
        assert same(load(run, "best")[0], whole_state(1, LARGE if step == 1 else None))
    assert same(load(run, "step_000000003")[0], whole_state(3, None))
    assert load(run, "best", only=POLICY)[1]["step"] == 1


def test_earlier_checkpoints_keep_a_small_replay(run):
    for step in range(1, 3):
        save(run, whole_state(step), step, {}, keep=2)
    assert same(load(run, "step_000000001")[0], whole_state(1))


def test_best_checkpoint_is_complete_while_replay_is_dropped(run):
    save(run, whole_state(1, LARGE), 1, {}, keep=1, best=True)
    kept = {file.name: file.read_bytes() for file in (run.checkpoints / "best").iterdir()}
    save(run, whole_state(2), 2, {}, keep=1)
    for name, content in kept.items():  # as if it had been killed before it removed the files
        if name.startswith("replay"):
            (run.checkpoints / "best" / name).write_bytes(content)
    assert same(load(run, "best")[0], whole_state(1, replay=None))
    save(run, whole_state(3), 3, {}, keep=1)
    assert not (run.checkpoints / "best" / "replay.safetensors").exists()


def test_remains_of_a_killed_save_are_removed(run):
    (run.checkpoints / ".tmp-step_000000001").mkdir()
    (run.checkpoints / ".tmp-step_000000001" / "state.safetensors").write_bytes(b"x")
    (run.checkpoints / ".tmp-latest").symlink_to("step_000000001")
    save(run, {}, 1, {}, keep=1)
    assert names(run) == ["latest", "step_000000001"]


_FULL_DISK = """
import resource, sys, numpy as np
from corral.core.errors import RunFailed
from corral.runs.checkpoints.checkpoint import save
from corral.runs.folder import RunFolder
run = RunFolder.open(sys.argv[1])
save(run, {"x": np.zeros(10)}, 1, {}, keep=1)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    save(run, {"x": np.zeros(1_000_000)}, 2, {}, keep=1)
except RunFailed as error:
    print(error)
"""


def test_full_disk_harms_no_checkpoint(run):
    out = subprocess.run([sys.executable, "-c", _FULL_DISK, str(run.path)], capture_output=True, text=True, check=True)
    assert (
        "step_000000002 cannot be written (File too large); earlier ones are intact: free some disk space" in out.stdout
    )
    assert names(run) == ["latest", "step_000000001"]
    assert load(run)[0]["x"].shape == (10,)


_SAVER = """
import sys, numpy as np
from corral.runs.checkpoints.checkpoint import load, save
from corral.runs.folder import RunFolder
run = RunFolder.open(sys.argv[1])
with run.lock():
    try:
        step = load(run)[0]["step"]
    except ValueError:
        step = 0
    while True:
        step += 1
        save(run, {"step": step, "x": np.full(200_000, step)}, step, {}, keep=2, best=step % 5 == 0)
        print(step, flush=True)
"""


def test_kill_at_any_moment_leaves_loadable_checkpoint(run):
    rng = random.Random(0)
    reached = 0
    for _ in range(6):
        process = subprocess.Popen(
            [sys.executable, "-c", _SAVER, str(run.path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        try:
            told = process.stdout.readline()
            assert told, process.stderr.read()
            signal.sigtimedwait([], rng.uniform(0.0, 0.15))
        finally:
            process.kill()
            told += process.communicate()[0]
        last = int(told.split("\n")[-2])
        notes = []
        state, meta = load(run, note=notes.append)
        assert notes == []  # nothing that has its name is ever half there
        assert state["step"] == meta["step"] >= last > reached
        assert (state["x"] == state["step"]).all()
        reached = last
        if (run.checkpoints / "best").exists():
            assert load(run, "best")[0]["step"] % 5 == 0
    save(run, {}, reached + 10, {}, keep=1)
    assert not [name for name in names(run) if name.startswith(".tmp")]
