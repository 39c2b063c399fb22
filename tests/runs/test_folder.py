import json
import os
import signal
import subprocess
import sys

import pytest

from corral.config.migrate import FORMAT
from corral.core.errors import UserError
from corral.runs.folder import RunFolder

CONFIG = {
    "algo": "ppo",
    "env": "CartPole-v1",
    "seed": 3,
    "algorithm": {"learning_rate": 3e-05, "net": {"hidden_sizes": [64, 64]}},
    "workers": None,
    "name": "ünï: #1",
}


def test_a_new_run_is_read_back_as_it_was(tmp_path):
    made = RunFolder.create(tmp_path / "a" / "b", CONFIG)
    found = RunFolder.open(tmp_path / "a" / "b")
    assert found.config == CONFIG
    assert found.info == made.info
    assert (found.algo, found.env) == ("ppo", "CartPole-v1")
    assert "hidden_sizes: [64, 64]" in (found.path / "config.yaml").read_text()


def test_run_json_has_versions_and_machine(tmp_path):
    info = json.loads((RunFolder.create(tmp_path, CONFIG).path / "run.json").read_text())
    assert info["format"] == FORMAT
    assert set(info["versions"]) == {"python", "corral-rl", "torch", "numpy", "gymnasium"}
    assert info["argv"] == sys.argv
    assert info["machine"]["cores"] == os.cpu_count()


def test_outside_of_a_git_repository_the_commit_is_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert RunFolder.create(tmp_path / "run", CONFIG).info["git"] is None


def test_without_git_a_run_is_made_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert RunFolder.create(tmp_path / "run", CONFIG).info["git"] is None


def test_the_commit_of_the_working_directory_is_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@y"]
    subprocess.run([*git, "init", "-q"], check=True)
    (tmp_path / "f").write_text("1")
    subprocess.run([*git, "add", "f"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "x"], check=True)
    assert RunFolder.create("run", CONFIG).info["git"]["dirty"] is False
    (tmp_path / "f").write_text("2")
    found = RunFolder.create("run2", CONFIG).info["git"]
    assert found["dirty"] is True
    assert len(found["sha"]) == 40


def test_a_configuration_can_be_replaced(tmp_path):
    run = RunFolder.create(tmp_path, CONFIG).write_config(CONFIG | {"steps": 9})
    assert run.config["steps"] == RunFolder.open(tmp_path).config["steps"] == 9


def test_creating_over_a_run_is_refused(tmp_path):
    RunFolder.create(tmp_path, CONFIG)
    with pytest.raises(UserError, match=r"already holds a run: .*corral resume"):
        RunFolder.create(tmp_path, CONFIG)


def test_overwriting_removes_the_old_run_and_nothing_else(tmp_path):
    old = RunFolder.create(tmp_path, CONFIG)
    old.metrics_csv.write_text("env_steps\n1\n")
    (old.checkpoints / "step_1").mkdir()
    (tmp_path / "events.out.tfevents.1").write_text("x")
    (tmp_path / "notes.txt").write_text("mine")
    new = RunFolder.create(tmp_path, CONFIG | {"seed": 4}, overwrite=True)
    assert new.config["seed"] == 4
    new.drop_replaced()
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        ".lock", "checkpoints", "config.yaml", "notes.txt", "run.json"
    ]  # fmt: skip
    assert not list(new.checkpoints.iterdir())


def test_a_replaced_run_returns_if_the_new_one_is_discarded(tmp_path):
    old = RunFolder.create(tmp_path, CONFIG)
    (old.checkpoints / "step_1").mkdir()
    for seed in (4, 5):  # the first one was killed before it could discard itself
        new = RunFolder.create(tmp_path, CONFIG | {"seed": seed}, overwrite=True)
    assert not list(new.checkpoints.iterdir())
    new.discard()
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "checkpoints", "config.yaml", "run.json"]
    assert RunFolder.open(tmp_path).config == old.config
    assert [p.name for p in old.checkpoints.iterdir()] == ["step_1"]


def test_files_of_earlier_versions_belong_to_the_run(tmp_path):
    run = RunFolder.create(tmp_path / "run", CONFIG)
    (run.path / "parts.json").write_text("[]")
    run.discard()
    assert not run.path.exists()


def test_a_run_in_training_is_not_overwritten(tmp_path):
    run = RunFolder.create(tmp_path, CONFIG)
    with run.lock(), pytest.raises(UserError, match=str(os.getpid())):
        RunFolder.create(tmp_path, CONFIG, overwrite=True)


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    for overwrite in (False, True):
        with pytest.raises(UserError, match=r"thesis\.tex.*empty --run-dir"):
            RunFolder.create(tmp_path, CONFIG, overwrite=overwrite)
    assert os.listdir(tmp_path) == ["thesis.tex"]


def test_remains_of_a_killed_creation_are_ignored(tmp_path):
    RunFolder.create(tmp_path, CONFIG)
    (tmp_path / "run.json").rename(tmp_path / ".tmp-run.json")
    assert RunFolder.create(tmp_path, CONFIG).config == CONFIG


def test_a_file_cannot_be_a_run(tmp_path):
    (tmp_path / "f").write_text("")
    with pytest.raises(UserError, match="cannot be used as a run directory"):
        RunFolder.create(tmp_path / "f", CONFIG)


def test_open_of_no_run_names_remedy(tmp_path):
    with pytest.raises(UserError, match=r"There is no run at .*nowhere"):
        RunFolder.open(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"not a run \(it has no run\.json\)"):
        RunFolder.open(tmp_path)
    RunFolder.create(tmp_path / "one", CONFIG)
    with pytest.raises(UserError, match=r"is not a run but contains 1: choose one of them, such as .*one"):
        RunFolder.open(tmp_path)


@pytest.mark.parametrize(
    ("found", "words"), [(FORMAT + 1, "a newer version"), (0, "another version"), ("x", "another")]
)
def test_a_run_of_another_format_is_refused(tmp_path, found, words):
    run = RunFolder.create(tmp_path, CONFIG)
    (tmp_path / "run.json").write_text(json.dumps(run.info | {"format": found}))
    with pytest.raises(UserError, match=rf"format {found}.*{words}.*reads formats 1"):
        RunFolder.open(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", "{"])
def test_damaged_run_json_is_one_line(tmp_path, text):
    RunFolder.create(tmp_path, CONFIG)
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(UserError, match="cannot be read"):
        RunFolder.open(tmp_path)


def test_two_processes_cannot_train_one_run(tmp_path):
    run = RunFolder.create(tmp_path, CONFIG)
    code = (
        "import sys, time; from corral.runs.folder import RunFolder\n"
        "with RunFolder.open(sys.argv[1]).lock():\n"
        " print('locked', flush=True); time.sleep(60)"
    )
    other = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout.readline() == "locked\n"
        assert run.holder() == other.pid
        with pytest.raises(UserError, match=rf"Process {other.pid} is training"), run.lock():
            pass
    finally:
        other.send_signal(signal.SIGKILL)
        other.communicate()
    assert run.holder() is None
    with run.lock():  # went with its process
        pass


def test_lock_names_its_holder(tmp_path):
    run = RunFolder.create(tmp_path, CONFIG)
    with run.lock():
        assert run.holder() == os.getpid()
        with pytest.raises(UserError, match="already"), RunFolder.open(tmp_path).lock():
            pass
        code = "import sys; from corral.runs.folder import RunFolder; print(RunFolder.open(sys.argv[1]).holder())"
        out = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
        assert out.stdout.strip() == str(os.getpid())  # to ask has not ended it
    assert run.holder() is None


@pytest.mark.linux("os.fork", hidden=True)
def test_a_forked_child_does_not_keep_the_lock(tmp_path):
    run = RunFolder.create(tmp_path, CONFIG)
    code = (
        "import os, sys, time; from corral.runs.folder import RunFolder\n"
        "with RunFolder.open(sys.argv[1]).lock():\n"
        " child = os.fork()\n"
        " if not child: os.close(1); time.sleep(60); os._exit(0)\n"
        " print(child, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    try:
        assert run.holder() == parent.pid
        parent.kill()
        parent.communicate()
        assert run.holder() is None
    finally:
        os.kill(child, signal.SIGKILL)


def test_file_in_place_of_a_run_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file is not a run"):
        RunFolder.open(tmp_path / "file")


def test_run_dir_with_too_long_a_name_is_one_sentence(tmp_path):
    with pytest.raises(UserError, match="cannot be used as a run directory: File name too long"):
        RunFolder.create(tmp_path / ("x" * 300), {"algo": "ppo"})
