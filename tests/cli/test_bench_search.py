"""`corral bench search`: small and fast, with whatever peers are installed."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict

import numpy as np
import pytest

from corral.bench.markdown import write_between
from corral.bench.rounds import Outcome, play
from corral.bench.search import Lab, make_cases, title
from corral.bench.search_board import boards_of, count_games
from corral.bench.search_check import Checks, check
from corral.bench.search_plain import PlainSearch
from corral.bench.search_report import MARKS, notes, remote_table, tables
from corral.bench.search_task import PERFT, ROOTS, Task, load_problem, make_problem, save_problem
from corral.envs.suites.games.connect4 import CONNECT4


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    file = tmp_path_factory.mktemp("search") / "problem.npz"
    save_problem(make_problem(), file)
    with Lab(file) as lab:
        lab.file = file
        yield lab


def test_a_problem_is_read_as_it_was_written(lab):
    problem, read = make_problem(), load_problem(lab.file)
    assert read.prefixes == problem.prefixes
    assert len(read.prefixes) == ROOTS
    assert {len(played) for played in read.prefixes} == set(range(21))
    for (weight, bias), (w, b) in zip(read.layers, problem.layers, strict=True):
        np.testing.assert_array_equal(weight, w)
        np.testing.assert_array_equal(bias, b)


def test_games_are_counted_as_everybody_counts_them():
    assert tuple(count_games(6)) == PERFT[:6]


def test_the_engine_of_corral_is_right_about_all_that_is_checked(lab):
    checks = check(load_problem(lab.file), lab.engine, ["corral"], 12, lambda text: None)
    assert not checks.failures
    assert (checks.plain, checks.moves) == (1.0, {"corral": 1.0})


def test_an_engine_that_plays_by_other_rules_or_chooses_otherwise_is_no_measure():
    wrong = Checks({"mctx": False}, {"mctx": 1e-3}, {"mctx": 0.5}, plain=0.9)
    assert len(wrong.failures) == 4
    assert not Checks({"mctx": True}, {"mctx": 1e-7}, {"mctx": 0.96, "lightzero": 0.5}, plain=1.0).failures


def test_the_plain_search_takes_a_win():
    board = CONNECT4.start(1)
    for column in (0, 6, 1, 6, 2, 5):
        CONNECT4.move(board, np.array([column]))
    assert PlainSearch(make_problem(), board[0]).counts(60).argmax() == 3


def test_contestants_count_what_they_do_and_say_what_is_missing(lab):
    (case,) = make_cases(["tree"], 10, lab)
    name = title("corral", Task("zero", 64, 4))
    wanted = [entry for entry in case.entries if entry.name == name]
    outcome = play(wanted, rounds=2, seconds=0.05)
    searching = lab.searching[name]
    assert searching.sims == searching.decisions * 64 * 10
    assert 0 < searching.work["steps"] <= searching.sims
    assert searching.percentile(0.5) <= searching.percentile(0.95)
    report = report_of(case, outcome)
    text = "\n".join(tables([report]))
    assert "| corral, 64 x 4 | " in text
    parts = lab.engine("corral").ask("parts", task=asdict(Task("network", 8, 4, 10)), seconds=0.05)
    assert set(parts) == {"network", "simulator", "tree"}
    assert min(parts.values()) > 0
    assert lab.facts()["corral"]["node_bytes"] < 300
    checked = Checks({"corral": True}, {"corral": 0.0}, {"corral": 1.0}, 1.0)
    assert "Corral's counts equal those of a plain PUCT in 100.0 %" in "\n".join(notes(checked, lab.facts(), [report]))


def report_of(case, outcome):
    from corral.bench.report import CaseReport
    from corral.bench.search import SCALE

    return CaseReport(case, outcome, [], case.verdicts(outcome, []), 0.0, case.base(outcome), SCALE)


def test_targets_are_judged_at_a_hundred_simulations_against_each_peers_best(lab):
    (case,) = make_cases(["tree"], 100, lab)
    ours, small, large = (
        title(*task)
        for task in (("corral", Task("zero", 64, 4)), ("mctx", Task("zero", 64)), ("mctx", Task("zero", 256)))
    )
    lab.engine("corral").ask("prepare", name="any", task=asdict(Task("zero", 1)))
    outcome = Outcome({ours: [900e3, 1000e3], small: [50e3, 50e3], large: [100e3, 200e3]}, {})
    assert case.base(outcome) == large
    floor, over_mctx, memory = case.verdicts(outcome, [])
    assert floor.reached
    assert (over_mctx.reached, over_mctx.figure.low, over_mctx.figure.high) == (False, 5.0, 9.0)
    assert memory.reached


def test_a_library_that_is_not_there_is_left_out_with_what_to_install(lab):
    (case,) = make_cases(["tree"], 10, lab)
    (entry,) = [entry for entry in case.entries if entry.name == "LightZero mz_tree, 64"]
    outcome = play([entry], rounds=1, seconds=0.05)
    assert entry.name in outcome.rates or "pip install --no-deps LightZero" in outcome.skipped[entry.name]


def test_states_over_the_link_have_a_table_of_their_own():
    from corral.bench.rounds import Spread
    from corral.bench.search_remote import Cost, Figure

    lines = remote_table([Figure("one", "sims/s", Spread(10, 9, 11), Spread(1, 1, 1))], Cost(2.0, 0.5))
    assert "A row of EXPAND takes 2.00 us, 0.50 of them in the simulator." in lines
    assert "| one           | 10 sims/s | 9 - 11 | 1.0                         |" in lines


def test_the_command_gives_tables_and_numbers_and_writes_them_between_the_markers(tmp_path):
    table = tmp_path / "BENCHMARKS.md"
    table.write_text(f"before\n{MARKS[0]}\nold\n{MARKS[1]}\nafter\n")
    done = subprocess.run(
        [sys.executable, "-m", "corral.cli.main", "bench", "search", "--case", "tree", "--rounds", "1", "--seconds",
         ".05", "--sims", "4", "--out", str(tmp_path), "--table", str(table)],
        capture_output=True, text=True, timeout=250,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for words in ("Connect Four, 4 simulations, no network:", "| corral, 64 x 4 ", "Checked before: ", "Wrote "):
        assert words in done.stdout
    data = json.loads((tmp_path / "search.json").read_text())
    assert data["checks"]["plain"] == 1.0
    assert data["cases"][0]["unit"] == "simulations per second"
    text = table.read_text()
    assert "`corral bench search --case tree --sims 4 --rounds 1 --seconds 0.05` on " in text
    assert "old" not in text
    write_between(table, MARKS, ["new"])
    assert table.read_text() == f"before\n{MARKS[0]}\nnew\n{MARKS[1]}\nafter\n"


def test_boards_are_the_positions_that_were_played():
    problem = make_problem()
    boards = boards_of(problem)
    stones = [bin(int(every)).count("1") for _, every in boards]
    assert stones == [len(played) for played in problem.prefixes]
