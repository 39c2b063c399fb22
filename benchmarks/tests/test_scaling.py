"""`python -m benchmarks training` of topologies with actors, beside libraries that cannot be told to pause."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from command import run

from benchmarks.common.children import child_env
from benchmarks.common.rounds import Entry, Outcome, Slice, Spread, play
from benchmarks.training import free_running, scaling
from benchmarks.training.free_running import FreeRunning
from benchmarks.training.scaled import MeteredLoops, Scaled, Usage, cpu_s
from benchmarks.training.scaling import BARE, CENTRAL, LOCAL, ScalingCase

# Prints its steps, and has a child that makes a file grow, in a process group of its own, deaf to its parent's end.
LIBRARY = """
    import os, subprocess, sys, time
    child = "import signal, time\\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\\nwhile True: time.sleep(.001); "
    child += f"open({sys.argv[1]!r}, 'a').write('x')"
    subprocess.Popen([sys.executable, "-c", child], preexec_fn=os.setpgrp)
    print("a warning", file=sys.stderr)
    steps = 0
    while True:
        time.sleep(0.002)
        steps += 5
        print(steps, time.monotonic(), flush=True)
"""


@pytest.fixture
def library(tmp_path):
    def start(text=LIBRARY):
        script = tmp_path / "library.py"
        script.write_text(textwrap.dedent(text))
        player = FreeRunning(script, str(tmp_path / "count"))
        started.append(player)
        return player

    started: list[FreeRunning] = []
    yield start
    for player in started:
        player.close()


def await_size(path, least):
    until = time.monotonic() + 30
    while time.monotonic() < until:
        if path.exists() and path.stat().st_size >= least:
            return
        time.sleep(0.01)
    raise AssertionError(f"the child does not get to {least}")


# -- free running --------------------------------------------------------------------------------------------------


def test_peer_processes_pause_between_slices(library, tmp_path):
    player = library()
    done = player.run(0.1)
    assert done.steps > 0
    assert done.steps % 5 == 0
    assert done.seconds >= 0.1
    file = tmp_path / "count"
    size = file.stat().st_size if file.exists() else 0
    time.sleep(0.2)
    assert (file.stat().st_size if file.exists() else 0) == size
    player._signal(signal.SIGCONT)
    await_size(file, size + 1)


def test_steps_before_a_slice_do_not_count(library):
    """What was printed and not read when it was halted is older than the slice."""
    player = library()
    player.run(0.05)
    resumed = time.monotonic()
    player._rest = f"1 {resumed - 1}\n2 {resumed - 0.5}\n".encode() + player._rest
    done = player.run(0.05)
    assert done.steps > 0
    assert done.steps % 5 == 0, "from one of its own reports to another"


def test_closing_leaves_nothing_behind(library):
    player = library()
    leader, folder = player._process.pid, Path(player._folder.name)
    assert len(free_running._session(leader)) == 2
    before = sum(os.times()[2:4])
    player.close()
    assert free_running._session(leader) == []
    assert not folder.exists()
    assert sum(os.times()[2:4]) > before, "their CPU time counts as ours"


def test_paused_peer_ends_with_the_parent(tmp_path):
    """Also when it is never closed."""
    script = tmp_path / "library.py"
    script.write_text(textwrap.dedent(LIBRARY))
    code = f"""
        import os
        from pathlib import Path
        from benchmarks.training.free_running import FreeRunning
        player = FreeRunning(Path({str(script)!r}), {str(tmp_path / "count")!r})
        player.run(0.05)
        print(player._process.pid, flush=True)
        os.kill(os.getpid(), 9)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60,
        env=child_env(TMPDIR=str(tmp_path)),
    )  # fmt: skip
    leader = int(done.stdout)
    until = time.monotonic() + 20
    while free_running._session(leader) and time.monotonic() < until:
        time.sleep(0.05)
    assert free_running._session(leader) == []


def test_missing_library_is_named(tmp_path):
    script = tmp_path / "library.py"
    script.write_text("import no_such_library")
    entry = Entry("peer", "peer", lambda: FreeRunning(script), "pip install it")
    outcome = play([entry], 1, 0.05)
    assert outcome.skipped == {"peer": "not installed (no_such_library): pip install it"}


def test_failing_library_reports_its_error(library):
    with pytest.raises(RuntimeError, match="ValueError: seven is not a number of workers"):
        library("raise ValueError('seven is not a number of workers')")


@pytest.mark.skipif(importlib.util.find_spec("sample_factory") is not None, reason="it is installed")
def test_without_sample_factory_the_remedy_is_an_option():
    case = scaling.make_case("appo")
    outcome = play([entry for entry in case.entries if entry.name in case.theirs[:1]], 1, 0.05)
    assert "--sample-factory PYTHON" in outcome.skipped[case.theirs[0]]
    assert case.verdicts(Outcome({case.ours[0]: [1.0]}, {}), []) == []


# -- topologies ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [{"topology": "actor_learner", "actors": 2}, {"topology": "central_inference", "actors": 2}, {"topology": "sync"}],
    ids=lambda settings: settings["topology"],
)
def test_every_topology_trains_in_slices(settings):
    usage = Usage()
    player = Scaled("impala", "CartPole-v1", usage, num_envs=4, num_steps=8, batch_size=4, **settings)
    try:
        before = player._topology.env_steps
        done = player.run(0.05)
        assert done.steps > 0
        assert player._topology.env_steps - before - done.steps >= 2 * 4 * 8, "what waited was not counted"
        assert player._topology.learner.version > 0
        assert (usage.steps, usage.seconds) == (done.steps, done.seconds)
    finally:
        player.close()


def test_cpu_time_of_bare_loops_is_noted():
    usage = Usage()
    loops = MeteredLoops(usage, "CartPole-v1", 4, 2)
    try:
        assert loops.run(0.2).steps == usage.steps
        assert usage.acting > 0
    finally:
        loops.close()
    assert cpu_s([None, 2**30]) == 0.0


@pytest.mark.parametrize("name", scaling.CASES)
def test_every_case_compares_its_own_contestants(name):
    case = scaling.make_case(name)
    names = [entry.name for entry in case.entries]
    assert len(set(names)) == len(names)
    assert {*case.ours, *case.theirs} <= set(names)
    assert set(case.usage) <= set(names)


# -- verdicts ------------------------------------------------------------------------------------------------------


def make(**more):
    return ScalingCase("appo", "APPO", [], ["corral, 1", "corral, 2"], ["SF, 8", "SF, 32"], 3.0, "SF", **more)


def test_best_of_ours_over_best_of_theirs():
    rates = {"corral, 1": [90.0, 80.0], "corral, 2": [100.0, 90.0], "SF, 8": [10.0, 9.0], "SF, 32": [25.0, 30.0]}
    outcome = Outcome(rates, {})
    assert make().base(outcome) == "SF, 32"
    (verdict,) = make().verdicts(outcome, [])
    assert (verdict.contestant, verdict.figure, verdict.reached) == ("corral, 2", Spread(3.5, 3.0, 4.0), True)
    assert make().verdicts(Outcome({"SF, 8": [1.0]}, {}), []) == []


def test_verdict_with_known_ideal_is_its_share():
    case = make(ideal=200.0, bound="The ideal is known.")
    (verdict,) = case.verdicts(Outcome({"corral, 1": [100.0, 190.0]}, {}), [])
    assert verdict.figure == Spread(0.725, 0.5, 0.95)
    assert str(verdict).endswith("Measured: corral, 1. The ideal is known.")


def test_layers_sum_to_all_cores_and_largest_bounds():
    cores, usage = scaling.cores(), {"corral, 1": Usage(), BARE: Usage()}
    usage["corral, 1"].add(Slice(2048, 0.1), acting=0.06, learning=0.01)
    usage[BARE].add(Slice(1024, 0.01), acting=0.012)
    outcome = Outcome({"corral, 1": [20_480.0], BARE: [102_400.0], "SF, 8": [1.0]}, {})
    case = make(usage=usage)
    (row,) = case.layers(outcome)
    figures = [row.layers[column].median for column in scaling.COLUMNS]
    assert figures[:3] == pytest.approx([12.0, 18.0, 5.0])
    assert sum(figures) == pytest.approx(row.total.median) == pytest.approx(50.0 * cores)
    (verdict,) = case.verdicts(outcome, [row])
    assert "the simulator alone steps 5.0 times as fast" in verdict.bound
    assert case.layers(Outcome({"SF, 8": [1.0]}, {})) == []


def test_command_compares_central_and_local_inference(tmp_path):
    done = run("training", "--case", "central", "--rounds", "1", "--seconds", "0.05", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    target = f"{CENTRAL} over {LOCAL}: "
    for words in ("IMPALA CartPole-v1, 32 environments", f"| {CENTRAL} ", target, "target: at least 0.87", "x local"):
        assert words in done.stdout
    (case,) = json.loads((tmp_path / "training.json").read_text())["cases"]
    assert case["skipped"] == {}
    assert {row["name"] for row in case["contestants"]} == {CENTRAL, LOCAL}
