import glob
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch

from corral.core.errors import UserError
from corral.runs.callbacks.slow_calls import SlowCalls
from corral.runs.folder import RunFolder
from corral.runs.plugins import Plugins
from corral.runs.sinks.base import MetricSinks
from corral.runs.sinks.csv import CsvSink, read_metrics


@pytest.fixture
def run(tmp_path):
    return RunFolder.create(tmp_path / "run", {"algo": "ppo", "env": "CartPole-v1", "seed": 0})


def open_sinks(run, purge_after=None, report=print):
    """The sinks that every run has."""
    return MetricSinks(Plugins().make_sinks(run, purge_after), report, SlowCalls(print, enabled=False))


def tensorboard(run):
    """Scalars as TensorBoard itself reads them: name -> [(step, value)]."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(run.path), {"scalars": 0}).Reload()
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_rows_are_in_both_files_as_soon_as_they_are_written(run):
    log = open_sinks(run)
    log.write(10, 0.5, {"train/return": 1.5, "loss/policy": torch.tensor(0.25)})
    log.write(20, 1.0, {"train/return": np.float32(2.5), "loss/policy": 1e-30})
    assert run.metrics_csv.read_text() == (
        "env_steps,wall_s,train/return,loss/policy\n10,0.5,1.5,0.25\n20,1.0,2.5,1e-30\n"
    )
    assert tensorboard(run)["train/return"] == [(10, 1.5), (20, 2.5)]
    log.close()


@pytest.mark.parametrize(
    ("named", "made"),
    [([], ["CsvSink", "TensorBoardSink"]), (["csv"], ["CsvSink"]), (["tensorboard"], ["CsvSink", "TensorBoardSink"])],
)
def test_naming_built_in_sinks_chooses_among_them(run, named, made):
    """`metrics.csv` is always written: other commands read it."""
    sinks = Plugins.find(sinks=named).make_sinks(run, None)
    assert [type(sink).__name__ for sink in sinks] == made
    for sink in sinks:
        sink.close()


def test_numbers_come_back_bit_for_bit(run):
    values = np.random.default_rng(0).standard_normal(50) * 10.0 ** np.arange(-25, 25)
    log = open_sinks(run)
    for i, value in enumerate(values):
        log.write(i, i, {"x": value})
    log.close()
    assert (read_metrics(run.path)["x"] == values).all()


def test_new_names_become_columns_and_the_header_stays_right(run):
    log = open_sinks(run)
    log.write(1, 0.1, {"b": 1})
    log.write(2, 0.2, {"c": 2})
    log.write(3, 0.3, {'a, quoted"': 3, "b": 4})
    log.close()
    found = read_metrics(run.path)
    assert list(found) == ["env_steps", "wall_s", "b", "c", 'a, quoted"']
    assert found["env_steps"].tolist() == [1, 2, 3]
    np.testing.assert_array_equal(found["b"], [1, np.nan, 4])
    np.testing.assert_array_equal(found["c"], [np.nan, 2, np.nan])
    np.testing.assert_array_equal(found['a, quoted"'], [np.nan, np.nan, 3])


def test_nan_and_infinity_are_kept(run):
    log = open_sinks(run)
    log.write(1, 0, {"x": float("nan"), "y": float("-inf")})
    log.close()
    found = read_metrics(run.path)
    assert np.isnan(found["x"][0])
    assert found["y"][0] == -np.inf


def test_resume_cuts_rows_after_checkpoint(run):
    log = open_sinks(run)
    for step in (10, 20, 30, 40):
        log.write(step, step / 10, {"x": step})
    log.close()
    log = open_sinks(run, purge_after=20)
    log.write(25, 2.5, {"x": -25, "y": 1})
    log.close()
    found = read_metrics(run.path)
    assert found["env_steps"].tolist() == [10, 20, 25]
    assert found["x"].tolist() == [10, 20, -25]
    assert tensorboard(run)["x"] == [(10, 10), (20, 20), (25, -25)]


def test_resume_from_step_0_keeps_columns_only(run):
    log = open_sinks(run)
    log.write(10, 1, {"x": 1})
    log.close()
    open_sinks(run, purge_after=0).close()
    assert run.metrics_csv.read_text() == "env_steps,wall_s,x\n"
    assert read_metrics(run.path) == {}


def test_a_last_line_that_was_cut_is_left_out_and_then_replaced(run):
    log = open_sinks(run)
    log.write(10, 1, {"x": 1})
    log.close()
    with open(run.metrics_csv, "a") as file:
        file.write("20,2.0,12")  # of 12345
    assert read_metrics(run.path)["x"].tolist() == [1]
    log = open_sinks(run, purge_after=30)
    log.write(20, 2, {"x": 2})
    log.close()
    assert read_metrics(run.path)["x"].tolist() == [1, 2]


@pytest.mark.parametrize("text", [None, "", "env_steps,wa", "env_steps,wall_s\n", "env_steps,wall_s\n1"])
def test_a_file_without_rows_reads_as_nothing(run, text):
    if text is not None:
        run.metrics_csv.write_text(text)
    assert read_metrics(run.path) == read_metrics(run.metrics_csv) == {}


def test_the_end_of_a_long_file_can_be_read_alone(run):
    log = open_sinks(run)
    for step in range(1, 1001):
        log.write(step, step, {"x": step})
    log.close()
    found = read_metrics(run.path, last_bytes=1000)
    assert 10 < len(found["x"]) < 1000
    assert found["x"][-1] == 1000
    assert (np.diff(found["x"]) == 1).all()
    assert len(read_metrics(run.path, last_bytes=10**9)["x"]) == 1000


def test_tensorboard_needs_no_tensorflow_or_thread(run):
    code = (
        "import sys, threading\n"
        "from pathlib import Path; from corral.runs.sinks.tensorboard import TensorBoardSink\n"
        "log = TensorBoardSink(Path(sys.argv[1])); log.write(1, {'x': 1})\n"
        "print(threading.active_count(), 'tensorflow' in sys.modules, 'torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code, str(run.path)], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["1", "False", "False"]


_WRITER = """
import sys
from corral.runs.folder import RunFolder
from corral.runs.plugins import Plugins
from corral.runs.sinks.base import MetricSinks
from corral.runs.callbacks.slow_calls import SlowCalls
log = MetricSinks(Plugins().make_sinks(RunFolder.open(sys.argv[1]), None), print, SlowCalls(print))
for step in range(1, 10**9):
    log.write(step, step, {"x": step, f"late/{step // 50}": 1} if step % 50 == 0 else {"x": step})
    print(step, flush=True)
"""


def test_a_killed_run_loses_no_row_that_was_written(run):
    process = subprocess.Popen([sys.executable, "-c", _WRITER, str(run.path)], stdout=subprocess.PIPE, text=True)
    for _ in range(130):
        last = process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    last = (last + process.communicate()[0]).split("\n")[-2]
    found = read_metrics(run.path)["x"]
    assert len(found) >= int(last)
    assert (found == np.arange(1, len(found) + 1)).all()
    assert tensorboard(run)["x"][int(last) - 1] == (int(last), int(last))
    assert len(glob.glob(f"{run.path}/events.out.tfevents.*")) == 1


def test_rows_that_were_harmed_are_no_numbers_and_do_no_harm(run):
    log = open_sinks(run)
    for step in (1, 2, 3):
        log.write(step, step, {"a": step})
    log.close()
    text = run.metrics_csv.read_bytes().replace(b"\n2,", b"\n\xff\x00,")
    run.metrics_csv.write_bytes(text + b"\x00\xff,junk\n")
    found = read_metrics(run.path)
    np.testing.assert_array_equal(found["env_steps"], [1, np.nan, 3])
    log = open_sinks(run, purge_after=2)
    log.close()
    assert read_metrics(run.path)["env_steps"].tolist() == [1]


def test_a_file_that_is_no_table_of_metrics_is_named(run):
    run.metrics_csv.write_bytes(b"\xff\x00,b\n1,2\n")
    for look in (lambda: read_metrics(run.path), lambda: open_sinks(run)):
        with pytest.raises(UserError, match=r"metrics\.csv is not a table of metrics"):
            look()


def test_an_old_and_a_new_column_of_a_metric_become_one(run):
    run.metrics_csv.write_text("env_steps,wall_s,learners/left_out,x,learners/dropped_batches\n1,1,2,7,\n2,2,,8,3\n")
    CsvSink(run.metrics_csv, purge_after=2).close()
    assert run.metrics_csv.read_text() == "env_steps,wall_s,learners/dropped_batches,x\n1,1,2,7\n2,2,3,8\n"
