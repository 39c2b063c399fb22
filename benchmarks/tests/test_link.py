"""`python -m benchmarks link`: small and fast, with simulators in Python."""

from __future__ import annotations

import json

import numpy as np
import pytest
from command import run

from benchmarks.common.markdown import write_between
from benchmarks.common.report import CaseReport
from benchmarks.common.rounds import Outcome, play
from benchmarks.link import cases as link
from benchmarks.link.report import MARKS, notes, section, tables
from benchmarks.link.sims import Noop, compile_noop
from corral.core.errors import UserError

PYTHON = Noop(None, why="no compiler here")


def report(case, rates, skipped=()):
    outcome = Outcome(rates, dict(skipped))
    layers = case.layers(outcome)
    return CaseReport(case, outcome, layers, case.verdicts(outcome, layers), 0.0, link.JSON, link.SCALE)


def test_bare_contestant_sends_as_many_bytes_as_the_link():
    from corral.link.layout import LeafGroup, RowsLayout
    from corral.link.message import Message
    from corral.link.transports.framing import pack

    for n in (1, 64):
        request = Message(17, payload=[bytes(4 * n), np.zeros(n, np.int64).tobytes()]).frames()
        obs = LeafGroup([(np.dtype(np.float32), (4,))]).make(n)[0]
        reply = Message(17, payload=[RowsLayout(1, True).group().make(n)[0], obs]).frames()
        assert link.message_sizes("f4", n) == tuple(sum(map(len, pack(frames))) for frames in (request, reply))


@pytest.mark.parametrize("name", ["single", "sims", "images"])
def test_time_of_every_contestant_is_accounted_for(name):
    (case,) = link.make_cases([name], PYTHON)
    wanted = {link.TCP, link.BARE, link.ZMQ if name == "images" else link.JSON}
    outcome = play([entry for entry in case.entries if entry.name in wanted], rounds=1, seconds=0.05)
    assert not outcome.skipped
    assert set(outcome.rates) == wanted
    for row in case.layers(outcome):
        assert sum(part.median for part in row.layers.values()) == pytest.approx(row.total.median, rel=0.5)
    assert case.meters[link.TCP].work_s > 0
    assert case.meters[link.TCP].overhead_us > 0


@pytest.mark.parametrize("sims", [1, 2])
def test_json_peer_returns_the_simulators_counts(sims):
    from benchmarks.link.peers import ReqRep

    peer = ReqRep(4, sims, PYTHON.command)
    try:
        for _ in range(2):
            peer.step(np.array([0, 1, 1, 0]))
        np.testing.assert_array_equal(peer.obs[:, 0], [2, 4, 4, 2])
        assert (peer.reward == 1).all()
        assert not peer.terminated.any()
    finally:
        peer.close()


def test_grpc_peer_returns_the_simulators_counts():
    pytest.importorskip("grpc")
    pytest.importorskip("google.protobuf")
    from benchmarks.link.peers import GrpcUnary

    peer = GrpcUnary(2)
    try:
        peer.step(np.array([0, 1]))
        np.testing.assert_array_equal(peer.obs[:, 3], [1, 2])
    finally:
        peer.close()


def test_verdict_names_the_largest_part():
    (case,) = link.make_cases(["single"], PYTHON)
    case.meters[link.TCP] = link.Meter(2, 1000, wall_s=0.080, cpu_s=0.050, work_s=0.002)
    case.meters[link.BARE] = link.Meter(2, 1000, wall_s=0.030, cpu_s=0.010)
    (verdict,) = report(case, {link.TCP: [12_500.0, 13_000.0], link.BARE: [30_000.0, 34_000.0]}).verdicts
    assert verdict.reached
    assert "bare TCP, the same bytes reaches 32.0 thousand" in str(verdict)
    assert "a step of all environments takes 80 us, mostly Python (40 us)" in str(verdict)
    (many,) = link.make_cases(["many"], PYTHON)
    (verdict,) = report(many, {link.TCP: [900.0, 700.0], link.JSON: [100.0, 100.0]}).verdicts
    assert (verdict.reached, verdict.figure.low) == (False, 7.0)


def test_tables_list_measured_and_skipped_contestants():
    (case,) = link.make_cases(["many"], PYTHON)
    found = report(case, {link.TCP: [2000.0], link.JSON: [100.0]}, {link.UNARY: "not installed"})
    text = "\n".join(tables([found]))
    assert "| corral tcp     | 2,000  | 2,000 - 2,000 | 500.00     | -            | 20.00 " in text
    assert f"Skipped: {link.UNARY}, not installed." in text
    assert "corral tcp Python" in notes(PYTHON, [found])[0]
    assert "Note: no compiler here." in notes(PYTHON, [found])


def test_section_is_written_between_markers(tmp_path):
    (case,) = link.make_cases(["single"], PYTHON)
    facts = {"date": "2026-11-16T00:00", "python": "3.11", "versions": {"numpy": "2"}}
    lines = section(
        [report(case, {link.TCP: [2000.0]})], PYTHON, facts, "python -m benchmarks link", "A machine.", "docs/link.png"
    )
    path = tmp_path / "BENCHMARKS.md"
    with pytest.raises(UserError, match="no place for the table"):
        write_between(path, MARKS, lines)
    path.write_text(f"before\n{MARKS[0]}\nold\n{MARKS[1]}\nafter\n")
    write_between(path, MARKS, lines)
    text = path.read_text()
    assert text.startswith(
        f"before\n{MARKS[0]}\n`python -m benchmarks link` on 2026-11-16, Python 3.11, numpy 2. A machine.\n"
    )
    assert "![rows per second](docs/link.png)" in text
    assert text.endswith(f"{MARKS[1]}\nafter\n")
    assert "old" not in text


def test_python_simulators_without_a_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "/bin/false")
    noop = compile_noop(tmp_path)
    assert noop.binary is None
    assert "the compiler failed" in noop.why
    assert noop.command("link", "tcp://x:1")[1:] == ["-m", "benchmarks.link.peers", "link", "tcp://x:1"]


def test_compiled_simulator_is_used_where_possible(tmp_path):
    noop = Noop(tmp_path / "noop", zmq=False)
    assert noop.command("link", "tcp://x:1") == [str(tmp_path / "noop"), "--connect", "tcp://x:1"]
    assert noop.command("bytes", "1", "2", "3")[1:] == ["bytes", "1", "2", "3"]
    assert [noop.language("link", "tcp://"), noop.language("link", "zmq://"), noop.language("json")] == [
        "C++", "Python", "Python",
    ]  # fmt: skip


def test_command_prints_tables_and_writes_json(tmp_path):
    done = run("link", "--case", "rows", "--rounds", "1", "--seconds", ".1", "--out", tmp_path, CXX="/bin/false")
    assert done.returncode == 0, done.stderr
    for words in ("256 environments of 84 floats:", "| corral tcp ", "so simulators are Python", "Wrote "):
        assert words in done.stdout
    data = json.loads((tmp_path / "link.json").read_text())
    (case,) = data["cases"]
    assert not case["skipped"]
    assert case["unit"] == "rows per second"
