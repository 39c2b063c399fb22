"""`corral plot` and `corral top`, through the options that a user gives."""

import contextlib
import csv
import io
import os
import pty
import select
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from corral.cli.main import main
from corral.cli.options import parse
from corral.cli.plot import Plot
from corral.cli.top import Top
from corral.core.errors import UserError
from corral.runs.checkpoints.checkpoint import save
from corral.runs.events import EventLog
from corral.runs.folder import RunFolder
from corral.runs.sinks.csv import CsvSink
from corral.runs.views.plot import curves

CONFIG = {
    "algo": "ppo",
    "env": "CartPole-v1",
    "steps": 1000,
    "algorithm": {"learning_rate": 0.001, "net": {"hidden_sizes": [64]}},
}


def make(path, rows=(), seed=0, **changes):
    run = RunFolder.create(path, CONFIG | {"seed": seed} | changes)
    log = CsvSink(run.metrics_csv)
    for step, values in rows:
        log.write(step, {"wall_s": step / 100, **values})
    log.close()
    return run


def plot(*options):
    return parse(Plot, [str(option) for option in options], "corral plot").run()


def top(*options):
    return parse(Top, [str(option) for option in options], "corral top").run()


def rows(slope, stop=1000, step=100):
    return [(s, {"train/return": slope * s, "train/episodes": s // 10}) for s in range(step, stop + 1, step)]


def table(path):
    with open(path) as file:
        return list(csv.DictReader(file))


# -- plot ---------------------------------------------------------------------------------------------------


def test_evaluations_are_drawn_where_every_run_has_two(tmp_path, capsys):
    for name, count in (("two", 2), ("one", 1)):
        evaluated = [(s, {"eval/return": 400.0}) for s in range(500, 500 + count)]
        make(tmp_path / name, rows(1) + evaluated)
    plot(tmp_path / "two", "-o", tmp_path / "curve.png")
    assert "eval/return 400 at env_steps 501" in capsys.readouterr().out
    plot(tmp_path / "two", tmp_path / "one", "-o", tmp_path / "curve.png")
    assert "train/return 1000 at env_steps 1,000" in capsys.readouterr().out


@pytest.mark.parametrize(("returns", "threshold"), [((495, 500), 510.0), ((-0.44, -0.39), None), ((-21, 21), None)])
def test_the_axis_of_a_plot_includes_zero_and_threshold(tmp_path, monkeypatch, returns, threshold):
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **how: drawn.append(self.axes[0]))
    make(tmp_path / "run", [(s, {"train/return": y}) for s, y in enumerate(returns)])
    plot(tmp_path / "run", "-o", tmp_path / "x.png", *(() if threshold is None else ("--threshold", threshold)))
    low, high = drawn[0].get_ylim()
    assert low <= min(0, *returns)
    assert high >= max(0, *returns, threshold or 0)
    labels = [text.get_text() for text in drawn[0].get_legend().get_texts()]
    assert labels == ["ppo"] + ([] if threshold is None else ["threshold 510"])
    assert drawn[0].get_ylabel() == "return of training episodes\n(mean of the last 100)"


@pytest.mark.parametrize(
    ("value", "words"),
    [("nan", "threshold must be a finite number, got nan"), ("high", "a number is needed, got 'high'")],
)
def test_thresholds_that_are_no_numbers_are_refused(tmp_path, capsys, value, words):
    make(tmp_path / "run", rows(1))
    assert main(["plot", str(tmp_path / "run"), "-o", str(tmp_path / "x.png"), "--threshold", value]) == 2
    assert words in capsys.readouterr().err


def test_evaluations_in_the_background_have_a_place_on_every_axis(tmp_path):
    """Their rows, written later, have no counters."""
    make(tmp_path / "run", [(0, {"train/episodes": 0.0}), (100, {"train/episodes": 10.0}), (50, {"eval/return": 7.0})])
    (curve,) = curves([tmp_path / "run"], "eval/return", "episodes")
    assert (curve.x.tolist(), curve.mean.tolist()) == ([5.0], [7.0])


def test_one_run_becomes_a_png_and_a_csv(tmp_path, capsys):
    make(tmp_path / "run", rows(1))
    assert plot(tmp_path / "run", "-o", tmp_path / "new" / "curve.png") == 0
    assert (tmp_path / "new" / "curve.png").read_bytes().startswith(b"\x89PNG")
    drawn = table(tmp_path / "new" / "curve.csv")
    assert [(float(r["env_steps"]), float(r["train/return mean"])) for r in drawn] == [
        (s, s) for s in range(100, 1001, 100)
    ]
    assert "Wrote" in capsys.readouterr().out


@pytest.mark.parametrize("asked", ["exchange/timeouts", "exchange/let_go"])
def test_a_renamed_metric_is_drawn_from_old_and_new_runs(tmp_path, capsys, asked):
    runs = [make(tmp_path / name, [(100, {name: 3}), (200, {name: 4})]).path for name in ("old", "new")]
    for run, name in zip(runs, ("exchange/let_go", "exchange/timeouts"), strict=True):
        (run / "metrics.csv").write_text((run / "metrics.csv").read_text().replace(run.name, name))
    assert plot(*runs, "-o", tmp_path / "curve.png", "--metric", asked) == 0
    assert [row["exchange/timeouts mean"] for row in table(tmp_path / "curve.csv")] == ["3", "4"]
    assert "2 runs, exchange/timeouts 4 at" in capsys.readouterr().out


def test_seeds_of_one_configuration_become_a_mean_with_a_band(tmp_path):
    runs = [make(tmp_path / str(s), rows(s, step=100 + 20 * s), seed=s, log_every_s=s).path for s in (1, 2, 3)]
    (curve,) = curves(runs, "train/return")
    assert (curve.label, curve.env, curve.runs) == ("ppo", "CartPole-v1", 3)
    everyone = curve.count == 3
    assert everyone.any()
    np.testing.assert_allclose(curve.mean[everyone], 2 * curve.x[everyone])
    np.testing.assert_allclose(curve.low[everyone], curve.x[everyone])
    np.testing.assert_allclose(curve.high[everyone], 3 * curve.x[everyone])
    assert curve.count.min() == 2  # a place that one seed alone has come to is not drawn


def test_curves_are_labelled_by_their_difference(tmp_path):
    runs = [
        make(tmp_path / "a", rows(1)),
        make(tmp_path / "b", rows(1), algorithm={"learning_rate": 0.1, "net": {"hidden_sizes": [64]}}),
        make(tmp_path / "c", rows(1), algo="dqn", algorithm={"eps": 1}),
        make(tmp_path / "d", rows(1), seed=7),
    ]
    paths = [run.path for run in runs]
    assert [(c.label, c.runs) for c in curves(paths, "train/return")] == [
        ("ppo learning_rate=0.001", 2), ("ppo learning_rate=0.1", 1), ("dqn", 1),
    ]  # fmt: skip
    paths.append(make(tmp_path / "e", rows(1), env="Acrobot-v1").path)
    assert "ppo Acrobot-v1" in [c.label for c in curves(paths, "train/return")]
    assert plot(*paths, "-o", tmp_path / "all.png") == 0
    assert {row["curve"] for row in table(tmp_path / "all.csv")} == {
        "ppo CartPole-v1 learning_rate=0.001", "ppo CartPole-v1 learning_rate=0.1", "dqn CartPole-v1", "ppo Acrobot-v1",
    }  # fmt: skip


def test_a_run_that_is_given_twice_counts_once(tmp_path):
    path = make(tmp_path / "run", rows(1)).path
    assert curves([path, path / ".." / "run"], "train/return")[0].runs == 1


def test_many_curves_still_make_a_picture(tmp_path):
    paths = [make(tmp_path / str(i), rows(i), algo=f"algo{i}").path for i in range(12)]
    assert plot(*paths, "-o", tmp_path / "many.png") == 0


@pytest.mark.parametrize(("axis", "last"), [("env_steps", 1000), ("wall_s", 10), ("episodes", 100)])
def test_the_axis_can_be_steps_time_or_episodes(tmp_path, axis, last):
    make(tmp_path / "run", rows(1))
    assert plot(tmp_path / "run", "--x", axis, "-o", tmp_path / "c.png") == 0
    assert float(table(tmp_path / "c.csv")[-1][axis]) == last


def test_smoothing_takes_the_mean_of_the_last_rows(tmp_path):
    run = make(tmp_path / "run", [(s, {"train/return": y}) for s, y in enumerate([0, 4, 2, 6])])
    assert curves([run.path], "train/return", smooth=2)[0].mean.tolist() == [0, 2, 3, 4]
    assert curves([run.path], "train/return")[0].mean.tolist() == [0, 4, 2, 6]


def test_rows_without_the_metric_are_passed_over(tmp_path):
    run = make(tmp_path / "run", [(1, {"a": 1}), (2, {"b": 5}), (3, {"a": float("nan")}), (4, {"a": 2})])
    (curve,) = curves([run.path], "a")
    assert (curve.x.tolist(), curve.mean.tolist()) == ([1, 4], [1, 2])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--metric", "train/retrun"], "no metric 'train/retrun'; the nearest are train/return"),
        (["--metric", "return"], "the nearest are train/return"),
        (["--metric", "zzz"], "it has env_steps, wall_s, train/return, train/episodes"),
        (["--smooth", "0"], "smooth must be at least 1"),
        (["-o", "curve.pdf"], r"must end in \.png"),
        (["--x", "time"], "invalid choice 'time'"),
        (["-o", "/proc/none/c.png"], "cannot be written"),
    ],
)
def test_mistakes_are_one_line(tmp_path, monkeypatch, options, words):
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "run", rows(1))
    with pytest.raises(UserError, match=words):
        plot("run", *options)


def test_folder_without_run_or_rows_is_named(tmp_path):
    with pytest.raises(UserError, match="at least one run"):
        plot()
    with pytest.raises(UserError, match="is not a run"):
        plot(tmp_path)
    with pytest.raises(UserError, match="no rows yet"):
        plot(make(tmp_path / "new").path)
    late = make(tmp_path / "late", [(1, {"train/return": float("nan")})])
    with pytest.raises(UserError, match="no value of 'train/return' yet"):
        plot(late.path)


def test_plot_csv_does_not_replace_metrics_of_run(tmp_path):
    run = make(tmp_path / "run", rows(1))
    before = run.metrics_csv.read_text()
    with pytest.raises(UserError, match=r"would replace the run's own metrics\.csv"):
        plot(run.path, "-o", run.path / "metrics.png")
    assert run.metrics_csv.read_text() == before


def test_without_matplotlib_the_extra_is_named(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"corral-rl\[plot\]"):
        plot(make(tmp_path / "run", rows(1)).path, "-o", tmp_path / "c.png")


# -- top ----------------------------------------------------------------------------------------------------


def shown(run, capsys):
    capsys.readouterr()
    assert top(run.path) == 0
    return capsys.readouterr().out


def test_top_shows_a_run_that_is_training(tmp_path, capsys):
    run = make(
        tmp_path / "run",
        [(s, {"train/return": s / 10, "loss/policy": 0.5, "loss/value": 2.0, "actor/lag": 3}) for s in range(100, 501)]
        + [(501, {"eval/return": 475.0, "env/restarts": 2, "learn/skipped": 0})],
    )
    events = EventLog(run)
    for _ in range(1500):
        events.add("fault", "x")
    events.add("restart", "y")
    events.close()
    save(run, {}, 480, {}, keep=1, best=True)
    with run.lock():
        lines = dict(line.split(maxsplit=1) for line in shown(run, capsys).splitlines())
    assert f"running (pid {os.getpid()})" in lines["status"]
    assert lines["steps"] == "501 of 1,000  50.1%"
    assert lines["steps/s"] == "100 now, 100 on average"
    assert lines["time"] == "left   0:05"
    assert lines["return"].startswith("50 ")
    assert lines["last"].startswith("eval   475")
    assert lines["losses"] == "policy 0.5, value 2"
    assert lines["lag"] == "actor/lag 3"
    assert lines["checkpoint"].startswith("step_000000480, 0:0")
    assert lines["best"].startswith("step_000000480")
    assert lines["events"] == "1,500 fault, 1 restart, 2 environment restarts"


def test_top_prints_where_characters_are_few(tmp_path, monkeypatch):
    run = make(tmp_path / "run", rows(9))
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written := io.BytesIO(), "cp1252"))  # a pipe on Windows
    assert main(["top", str(run.path)]) == 0
    assert b"????" in written.getvalue()


@pytest.mark.linux("memory of a process from /proc", hidden=True)
def test_top_shows_the_memory_of_a_running_run(tmp_path, capsys):
    run = make(tmp_path / "run", rows(1))
    with run.lock():
        lines = dict(line.split(maxsplit=1) for line in shown(run, capsys).splitlines())
    assert lines["memory"].endswith(" MB")


@pytest.mark.parametrize(
    ("kinds", "words"),
    [
        ([], "killed or crashed"),
        (["finished"], "finished"),
        (["stopped"], "stopped"),
        (["failed"], "failed"),
        (["stopped", "resumed"], "killed or crashed"),
        (["stopped", "resumed", "fault", "finished"], "finished"),
    ],
)
def test_top_shows_how_a_run_ended(tmp_path, capsys, kinds, words):
    run = make(tmp_path / "run", rows(1))
    events = EventLog(run)
    for kind in kinds:
        events.add(kind, "")
    events.close()
    text = shown(run, capsys)
    assert f"status      {words}, last row" in text
    assert ("corral resume" in text) == (words != "finished")
    assert "time left" not in text


def test_top_shows_a_run_that_has_not_begun(tmp_path, capsys):
    text = shown(RunFolder.create(tmp_path / "run", CONFIG), capsys)
    assert "not started" in text
    assert "0 of 1,000" in text
    assert "none yet" in text


def test_top_of_no_run_is_one_line(tmp_path):
    with pytest.raises(UserError, match="is not a run"):
        top(tmp_path)


@contextlib.contextmanager
def on_a_terminal(run):
    """`corral top` of a run, and the terminal that it writes to."""
    code = "import sys; from corral.cli.top import Top; sys.exit(Top(sys.argv[1]).run())"
    ours, theirs = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", code, str(run.path)], stdout=theirs, stderr=theirs)
    os.close(theirs)
    try:
        yield process, ours
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def read_until(ours, words, seconds=60.0):
    text, end = "", time.monotonic() + seconds
    while words not in text and time.monotonic() < end:
        if select.select([ours], [], [], 0.5)[0]:
            text += os.read(ours, 4096).decode(errors="replace")
    assert words in text
    return text


def drained(process, ours, seconds=60.0):
    end = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < end:
        if select.select([ours], [], [], 0.1)[0]:
            try:
                os.read(ours, 4096)
            except OSError:  # the other end is closed
                break
    return process.wait(seconds)


def test_top_on_a_terminal_refreshes_until_ctrl_c(tmp_path):
    run = make(tmp_path / "run", rows(1))
    with run.lock(), on_a_terminal(run) as (process, ours):
        read_until(ours, "running (pid")
        read_until(ours, "running (pid")
        process.send_signal(signal.SIGINT)
        assert drained(process, ours) == 0


def test_top_on_a_terminal_ends_with_the_run(tmp_path):
    run = make(tmp_path / "run", rows(1))
    with on_a_terminal(run) as (process, ours):
        with run.lock():
            read_until(ours, "running (pid")
        read_until(ours, "killed or crashed")
        assert drained(process, ours) == 0
