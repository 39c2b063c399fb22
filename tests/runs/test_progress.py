import fcntl
import io
import os
import pty
import re
import struct
import termios

import pytest

from corral.runs.callbacks import progress
from corral.runs.callbacks.progress import Progress, brief, duration, progress_line

METRICS = {
    "train/return": 123.456, "eval/return": 475.0, "loss/kl": 0.1, "loss/policy": -0.03421, "loss/value": 9.0,
    "loss/entropy": 0.69,
}  # fmt: skip


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_progress_line():
    assert progress_line(45_056, 100_000, 12_345.0, METRICS, None) == (
        "45,056/100k 45%  12.3k steps/s  return 123.5  eval 475  policy -0.0342  value 9  entropy 0.69  ETA 0:04"
    )


def test_progress_never_exceeds_100_percent():
    assert progress_line(10_240, 10_000, 0.0, {}, None).startswith("10,240/10k 100%")
    assert progress_line(99_999, 100_000, 0.0, {}, None).startswith("99,999/100k 99%")


@pytest.mark.parametrize("width", range(1, 120))
def test_the_line_is_never_as_wide_as_the_terminal(width):
    line = progress_line(45_056, 100_000, 12_345.0, METRICS, width)
    assert len(line) < width
    if width > 32:
        assert line.endswith("ETA 0:04")


def test_before_anything_is_known_the_line_is_short():
    assert progress_line(0, 100, 0.0, {}, None) == "0/100 0%  0 steps/s"
    assert "nan" in progress_line(1, 100, 1.0, {"loss/q": float("nan")}, None)


def test_without_a_terminal_there_is_a_line_now_and_then(clock):
    out = io.StringIO()
    shown = Progress(10_000, stream=out)
    for second in range(31):
        clock[0] = 1000.0 + second
        shown.update(second * 100, {"train/return": float(second)})
    shown.close()
    lines = out.getvalue().splitlines()
    assert [line.split("/")[0] for line in lines] == ["200", "1,200", "2,200", "3,000"]
    assert all("100 steps/s" in line for line in lines)
    assert not re.search(r"[\r\x1b]", out.getvalue())


def test_what_is_done_besides_training_is_shown_now_and_then(clock):
    out = io.StringIO()
    shown = Progress(10_000, stream=out)
    for second in range(14):
        clock[0] = 1000.0 + second
        shown.busy(1_024, f"evaluating: {second} of 10 episodes")
    assert out.getvalue().splitlines() == [f"1,024/10k 10%  evaluating: {second} of 10 episodes" for second in (2, 12)]


def test_speed_is_of_recent_seconds_and_this_start(clock):
    out = io.StringIO()
    shown = Progress(10**6, start=500_000, stream=out)
    for second in range(1, 61):
        clock[0] = 1000.0 + second
        shown.update(500_000 + (10 * second if second <= 30 else 300 + 1000 * (second - 30)))
    lines = out.getvalue().splitlines()
    assert "  10 steps/s" in lines[0]
    assert "  1000 steps/s" in lines[-1]


def test_quiet_means_nothing_at_all(clock):
    out = io.StringIO()
    shown = Progress(100, quiet=True, stream=out)
    clock[0] += 100
    shown.update(50)
    shown.say("hello")
    shown.close()
    assert out.getvalue() == ""


def test_a_closed_stream_does_not_stop_the_run(clock):
    out = io.StringIO()
    shown = Progress(100, stream=out)
    out.isatty()
    out.close()
    clock[0] += 100
    shown.update(50)
    shown.close()


def test_on_a_terminal_one_line_is_rewritten_and_fits(clock, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 50, 0, 0))
    with os.fdopen(theirs, "w") as stream:
        shown = Progress(1000, stream=stream)
        for step in range(0, 1001, 10):
            clock[0] += 0.02
            shown.update(step, METRICS)
        shown.say("evaluated")
        shown.close()
        text = ""
        while text.count("\n") < 2:  # after what was said, and at the end
            text += os.read(ours, 1 << 16).decode()
    os.close(ours)
    parts = text.replace("\r\n", "\n").split("\r\x1b[K")[1:]
    assert 15 < len(parts) < 30  # ten a second
    assert all(len(part.rstrip("\n")) < 50 for part in parts)
    assert parts[-2] == "evaluated\n"
    assert parts[-1].startswith("1,000/1000 100%")


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.5, "0.5"), (-200.13, "-200.1"), (475.0, "475"), (9999, "9999"), (12345, "12.3k"), (-1.5e6, "-1.5M"),
     (3e9, "3G"), (1.234e-6, "1.23e-06"), (float("inf"), "inf"), (999_999, "1000k")],
)  # fmt: skip
def test_numbers_are_brief(value, text):
    assert brief(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (7.4, "0:07"), (59.6, "1:00"), (750, "12:30"), (11_100, "3:05:00"), (183_600, "2d 03h"),
     (float("inf"), "-")],
)  # fmt: skip
def test_durations_are_brief(seconds, text):
    assert duration(seconds) == text


def test_no_progress_without_stderr(monkeypatch):
    monkeypatch.setattr("sys.stderr", None)
    shown = Progress(100)
    shown.update(50, {"train/return": 1.0})
    shown.say("hello")
    shown.close()
