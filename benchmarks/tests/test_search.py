"""`python -m benchmarks search`: small and fast, with whatever peers are installed."""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
import pytest
from command import run

from benchmarks.common.markdown import write_between
from benchmarks.common.rounds import Outcome, play
from benchmarks.search.board import boards_of, count_games
from benchmarks.search.cases import Lab, make_cases, title
from benchmarks.search.check import Checks, check
from benchmarks.search.plain import PlainSearch
from benchmarks.search.remote import Apart, OneByOne, RemoteSearch, compiled
from benchmarks.search.report import MARKS, notes, remote_table, tables
from benchmarks.search.task import PERFT, ROOTS, SearchTask, load_problem, make_problem, save_problem
from corral.core.errors import UserError
from corral.envs.backends.simulators.states import LinkStates
from corral.envs.suites.games.connect4 import CONNECT4


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    file = tmp_path_factory.mktemp("search") / "problem.npz"
    save_problem(make_problem(), file)
    with Lab(file) as lab:
        lab.file = file
        yield lab


def test_problem_round_trip(lab):
    problem, read = make_problem(), load_problem(lab.file)
    assert read.prefixes == problem.prefixes
    assert len(read.prefixes) == ROOTS
    assert {len(played) for played in read.prefixes} == set(range(21))
    for (weight, bias), (w, b) in zip(read.layers, problem.layers, strict=True):
        np.testing.assert_array_equal(weight, w)
        np.testing.assert_array_equal(bias, b)


def test_perft_counts_match_published_ones():
    assert tuple(count_games(6)) == PERFT[:6]


def test_corral_engine_passes_all_checks(lab):
    checks = check(load_problem(lab.file), lab.engine, ["corral"], 12, lambda text: None)
    assert not checks.failures
    assert (checks.plain, checks.moves) == (1.0, {"corral": 1.0})


def test_engine_with_other_rules_or_moves_fails_check():
    wrong = Checks({"mctx": False}, {"mctx": 1e-3}, {"mctx": 0.5}, plain=0.9)
    assert len(wrong.failures) == 4
    assert not Checks({"mctx": True}, {"mctx": 1e-7}, {"mctx": 0.96, "lightzero": 0.5}, plain=1.0).failures


def test_plain_search_takes_a_win():
    board = CONNECT4.start(1)
    for column in (0, 6, 1, 6, 2, 5):
        CONNECT4.move(board, np.array([column]))
    assert PlainSearch(make_problem(), board[0]).counts(60).argmax() == 3


def test_contestants_count_work_and_report_missing_peers(lab):
    (case,) = make_cases(["tree"], 10, lab)
    name = title("corral", SearchTask("zero", 64, 4))
    wanted = [entry for entry in case.entries if entry.name == name]
    outcome = play(wanted, rounds=2, seconds=0.05)
    searching = case.searching[name]
    assert searching.sims == searching.decisions * 64 * 10
    assert 0 < searching.work["steps"] <= searching.sims
    assert searching.percentile(0.5) <= searching.percentile(0.95)
    (network,) = make_cases(["network"], 10, lab)
    next(entry for entry in network.entries if entry.name == name).build()
    assert case.searching[name] is searching  # contestants of another case have the same names
    report = report_of(case, outcome)
    text = "\n".join(tables([report]))
    assert "| corral, 64 x 4 | " in text
    parts = lab.engine("corral").ask("parts", task=asdict(SearchTask("network", 8, 4, 10)), seconds=0.05)
    assert set(parts) == {"network", "simulator", "tree"}
    assert min(parts.values()) > 0
    assert lab.facts()["corral"]["node_bytes"] < 300
    checked = Checks({"corral": True}, {"corral": 0.0}, {"corral": 1.0}, 1.0)
    assert "Corral's counts equal those of a plain PUCT in 100.0 %" in "\n".join(notes(checked, lab.facts(), [report]))


def report_of(case, outcome):
    from benchmarks.common.report import CaseReport
    from benchmarks.search.cases import SCALE

    return CaseReport(case, outcome, [], case.verdicts(outcome, []), 0.0, case.base(outcome), SCALE)


def test_targets_use_100_sims_and_each_peers_best(lab):
    (case,) = make_cases(["tree"], 100, lab)
    ours, small, large = (
        title(*task)
        for task in (
            ("corral", SearchTask("zero", 64, 4)),
            ("mctx", SearchTask("zero", 64)),
            ("mctx", SearchTask("zero", 256)),
        )
    )
    lab.engine("corral").ask("prepare", name="any", task=asdict(SearchTask("zero", 1)))
    outcome = Outcome({ours: [900e3, 1000e3], small: [50e3, 50e3], large: [100e3, 200e3]}, {})
    assert case.base(outcome) == large
    floor, over_mctx, memory = case.verdicts(outcome, [])
    assert floor.reached
    assert (over_mctx.reached, over_mctx.figure.low, over_mctx.figure.high) == (False, 5.0, 9.0)
    assert memory.reached
    assert str(floor).startswith(f"{case.label}: 950,000 simulations per second (range 900,000 to 1,000,000; target:")
    assert str(memory).endswith(f" bytes (target: at most 300). Met. Measured: {ours}.")


def test_missing_library_is_skipped_with_install_hint(lab):
    (case,) = make_cases(["tree"], 10, lab)
    (entry,) = [entry for entry in case.entries if entry.name == "LightZero mz_tree, 64"]
    outcome = play([entry], rounds=1, seconds=0.05)
    assert entry.name in outcome.rates or "pip install --no-deps LightZero" in outcome.skipped[entry.name]


def test_table_of_states_over_the_link():
    from benchmarks.common.rounds import Spread
    from benchmarks.search.remote import Cost, RemoteFigure

    lines = remote_table([RemoteFigure("one", "sims/s", Spread(10, 9, 11), Spread(1, 1, 1))], Cost(2.0, 0.5))
    assert "A row of EXPAND takes 2.00 us, 0.50 of them in the simulator." in lines
    assert "| one           | 10 sims/s | 9 - 11 | 1.0                         |" in lines


def test_command_writes_tables_between_markers(tmp_path):
    table = tmp_path / "BENCHMARKS.md"
    table.write_text(f"before\n{MARKS[0]}\nold\n{MARKS[1]}\nafter\n")
    size = ("--rounds", "1", "--seconds", ".05", "--sims", "4")
    done = run("search", "--case", "tree", *size, "--out", tmp_path, "--table", table)
    assert done.returncode == 0, done.stderr
    for words in ("Connect Four, 4 simulations, no network:", "| corral, 64 x 4 ", "Checked before: ", "Wrote "):
        assert words in done.stdout
    data = json.loads((tmp_path / "search.json").read_text())
    assert data["checks"]["plain"] == 1.0
    assert data["cases"][0]["unit"] == "simulations per second"
    text = table.read_text()
    assert "`python -m benchmarks search --case tree --sims 4 --rounds 1 --seconds 0.05` on " in text
    assert "old" not in text
    write_between(table, MARKS, ["new"])
    assert table.read_text() == f"before\n{MARKS[0]}\nnew\n{MARKS[1]}\nafter\n"


def test_boards_match_the_played_positions():
    problem = make_problem()
    boards = boards_of(problem)
    stones = [bin(int(every)).count("1") for _, every in boards]
    assert stones == [len(played) for played in problem.prefixes]


def test_measured_state_clients_build_the_same_trees(tmp_path):
    try:
        program = compiled("connect4", tmp_path)
    except UserError as error:
        pytest.skip(str(error))
    found = []
    for kind in (LinkStates, OneByOne, Apart):
        searching = RemoteSearch(program, kind, trees=3, leaves=2, sims=20)
        found.append(searching.search.forest.n.copy())
        done = searching.run(0.0)
        searching.close()
        assert done.steps == 3 * 20
    assert found[0][:, 0].sum() == 3 * 20
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])
