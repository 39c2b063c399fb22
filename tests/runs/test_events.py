import io
import json
import re

import pytest

import corral
from corral.core.errors import RunFailed
from corral.runs.events import EventLog, count_events, read_events
from corral.runs.folder import RunFolder


@pytest.fixture
def run(tmp_path):
    return RunFolder.create(tmp_path / "run", {"algo": "ppo", "env": "CartPole-v1", "seed": 0})


def test_an_event_is_a_line_of_json_at_once(run):
    log = EventLog(run)
    log.add("fault", "env 3 raised", env_steps=12, env_id=3, loss=float("nan"), path=run.path)
    (line,) = run.events_jsonl.read_text().splitlines()
    event = json.loads(line, parse_constant=pytest.fail)
    assert event.pop("time").startswith("20")
    assert event == {
        "env_steps": 12, "kind": "fault", "text": "env 3 raised", "env_id": 3, "loss": "nan", "path": str(run.path),
    }  # fmt: skip
    log.close()


def test_a_kind_that_happens_all_the_time_is_only_counted(run):
    log = EventLog(run)
    log.add("start", "x")
    for step in range(10_000):
        log.add("fault", "y", env_steps=step)
    lines = read_events(run.events_jsonl)
    assert len(lines) == 1 + 1000 + 3  # at 2000, 4000 and 8000
    assert lines[-1]["count"] == 8000
    log.close()
    assert count_events(run.events_jsonl) == {"start": 1, "fault": 10_000}
    assert read_events(run.events_jsonl)[-1]["env_steps"] == 9999


def test_resumed_run_continues_counting(run):
    for _ in range(3):
        log = EventLog(run)
        for _ in range(600):
            log.add("fault", "y")
        log.close()
    assert count_events(run.events_jsonl) == {"fault": 1800}
    assert len(read_events(run.events_jsonl)) < 1010


def test_a_line_that_was_cut_harms_no_other(run):
    log = EventLog(run)
    log.add("a", "x")
    log.close()
    with open(run.events_jsonl, "a") as file:
        file.write('{"kind": "a", "te')
    assert count_events(run.events_jsonl) == {"a": 1}
    log = EventLog(run)
    log.add("b", "y")
    log.close()
    assert [event["kind"] for event in read_events(run.events_jsonl)] == ["a", "b"]


def test_without_a_file_there_are_no_events(run):
    assert read_events(run.events_jsonl) == []
    assert not count_events(run.events_jsonl)


@pytest.mark.parametrize(
    ("algo", "scale"),
    [("ppo", {}), ("impala", {"actors": 1}), pytest.param("dppo", {"actors": 2}, marks=pytest.mark.slow)],
)
def test_environment_faults_are_events_with_id_and_message(algo, scale, tmp_path):
    corral.train(algo, "corral.testing:FaultyEnv", 400, 0, tmp_path / "run", quiet=True, num_envs=2, eval_episodes=0,
        env_kwargs={"kind": "raise", "every": 6}, **scale)  # fmt: skip
    texts = [event["text"] for event in read_events(tmp_path / "run" / "events.jsonl") if event["kind"] == "fault"]
    assert len(texts) >= 2
    expected = re.compile(r"environment [01] raised an exception .*: RuntimeError: the simulator broke$")
    assert all(expected.search(text) for text in texts)
    assert len(set(texts)) == len(texts)


def test_an_event_on_a_full_disk_ends_the_run_in_one_sentence(run):
    log = EventLog(run)
    log._file.close()
    log._file = io.FileIO("/dev/full", "ab")
    with pytest.raises(RunFailed, match=r"events.jsonl cannot be written \(No space left on device\): free disk space"):
        log.add("a", "x")
    log.close()
    assert log._file.closed


def test_texts_that_differ_in_numbers_are_written_rarely(run):
    log = EventLog(run)
    for step in range(1000):
        log.add_similar("fault", f"environment {step % 8} raised (step {step}): ValueError", env_steps=step)
    log.add_similar("fault", "environment 1 raised: KeyError")
    assert count_events(run.events_jsonl) == {"fault": 1001}
    log.close()
    events = read_events(run.events_jsonl)
    assert [event.get("similar") for event in events] == [None, 2, 4, 8, 16, 32, 64, 128, 256, 512, None, 1000]
    assert count_events(run.events_jsonl) == {"fault": 1001}
