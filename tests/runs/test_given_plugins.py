"""Callbacks and sinks as they are given: objects, classes and names; and what sinks get."""

import json

import pytest
from helpers.callback_runs import events, named, train
from helpers.callbacks import Lines, RaisingSink, Recorder, Rows

import corral
from corral.core.errors import UserError
from corral.runs.sinks.csv import read_metrics


def test_a_sink_gets_the_rows_of_metrics_csv(tmp_path):
    train(tmp_path / "run", sinks=[Lines(tmp_path / "rows.jsonl")])
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    found = read_metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == found["env_steps"].tolist()
    assert [row["loss/policy"] for row in rows] == found["loss/policy"].tolist()
    assert [row["wall_s"] for row in rows] == found["wall_s"].tolist()


def test_a_sink_that_changes_its_row_changes_no_other(tmp_path):
    class Greedy(corral.MetricSink):
        def write(self, step, values):
            values.clear()

    rows = Rows()
    train(tmp_path / "run", sinks=[Greedy(), rows])
    assert not events(tmp_path / "run", "sink_error")
    assert [row["train/return"] for _, row in rows.rows] == read_metrics(tmp_path / "run")["train/return"].tolist()


def test_a_sink_that_raises_is_dropped(tmp_path):
    sink = RaisingSink()
    assert train(tmp_path / "run", sinks=[sink]).steps == 512
    assert sink.rows == 2
    (event,) = events(tmp_path / "run", "sink_error")
    assert event["text"] == "metric sink RaisingSink is dropped: write raised OSError: the server is gone"
    assert len(read_metrics(tmp_path / "run")["env_steps"]) == 8


@pytest.mark.parametrize(("sinks", "has"), [((), True), (("csv",), False), (("csv", "tensorboard"), True)])
def test_named_sinks_choose_among_the_built_in(tmp_path, sinks, has):
    train(tmp_path / "run", steps=64, sinks=sinks)
    assert (tmp_path / "run/metrics.csv").exists()
    assert bool(list((tmp_path / "run").glob("events.out.tfevents.*"))) == has


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"callbacks": [3]}, "3 is not a callback: give a corral.Callback"),
        ({"callbacks": [Lines]}, "is not a callback"),
        ({"callbacks": ["Recorder"]}, "'Recorder' does not name a callback: give module:Class"),
        ({"callbacks": ["no.such:Thing"]}, "cannot be imported"),
        ({"callbacks": ["helpers.callbacks:Recordr"]}, "has no 'Recordr'; close: Recorder"),
        ({"callbacks": 3}, "3 is not a callback: give a corral.Callback"),
        ({"callbacks": "no.such:Thing"}, "cannot be imported"),
        ({"sinks": ["cvs"]}, "'cvs' does not name a sink: give module:Class, or one of csv, tensorboard"),
        ({"sinks": [object()]}, "is not a sink"),
        ({"sinks": [dict]}, "dict returned a dict, which is not a corral.MetricSink"),
    ],
)
def test_what_is_no_callback_or_sink_is_refused(tmp_path, given, words):
    with pytest.raises(UserError, match=words):
        train(tmp_path / "run", **given)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("given", [Recorder, Recorder(), "helpers.callbacks:Recorder"], ids=["class", "object", "name"])
def test_one_callback_needs_no_list(tmp_path, given):
    train(tmp_path / "run", steps=64, callbacks=given, sinks=None)
    assert named(tmp_path / "run", "on_end")


def test_a_class_that_needs_arguments_is_refused(tmp_path):
    class Needy(corral.Callback):
        def __init__(self, what):
            self.what = what

    with pytest.raises(UserError, match="Needy needs arguments"):
        train(tmp_path / "run", callbacks=[Needy])
    assert not (tmp_path / "run").exists()


def test_a_type_error_of_a_plugin_shows_its_own_message(tmp_path):
    class Broken(corral.Callback):
        def __init__(self):
            len(3)

    with pytest.raises(TypeError, match=r"object of type 'int' has no len\(\)"):
        train(tmp_path / "run", callbacks=[Broken])
    assert not (tmp_path / "run").exists()
