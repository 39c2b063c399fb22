"""`python -m benchmarks planning`: small and fast."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from command import run

from benchmarks.common.cpp import SDK
from benchmarks.planning.cases import (
    MPPI,
    MPPI_LINK,
    PENDULUM,
    POLICY,
    PlanningFigure,
    PlanningTask,
    Play,
    compile_pendulum,
    half_trained,
    planners,
    verdicts,
)
from benchmarks.planning.report import MARKS, save_curves, section, tables
from corral.core.errors import UserError

FACTS = {
    "date": "2026-11-17T00:00",
    "python": "3.11",
    "versions": {"corral-rl": "1", "torch": "2", "gymnasium": "3"},
}


def say(text):
    pass


def figure(name, sims, *seeds, env="CartPole-v1"):
    return PlanningFigure(
        env, name, sims, tuple(Play(k + 1, tuple(map(float, r)), 0.002, 7.5) for k, r in enumerate(seeds))
    )


def test_same_episodes_with_and_without_search(tmp_path):
    task = PlanningTask("CartPole-v1", 1_000)
    alone, searched = half_trained(task, [1, 2], [2], 3, tmp_path, say)
    assert (alone.name, alone.sims, searched.sims) == (POLICY, None, 2)
    assert [play.seed for play in alone.plays] == [play.seed for play in searched.plays] == [1, 2]
    assert all(len(play.returns) == 3 for play in (*alone.plays, *searched.plays))
    assert all(play.simulator_steps == 0 for play in alone.plays)
    assert all(1 < play.simulator_steps <= 2 for play in searched.plays)
    assert all(play.decision_s > 0 for play in (*alone.plays, *searched.plays))
    again, _ = half_trained(task, [1], [2], 3, tmp_path / "again", say)
    assert again.plays[0].returns == alone.plays[0].returns


def test_planners_report_their_simulator_steps():
    found = {figure.name: figure.plays[0] for figure in planners(PlanningTask("CartPole-v1", 0), [1], 8, 2, None, say)}
    assert list(found) == ["random actions", "shooting, 8 x 20 steps", "search, 8 random rollouts of 20 steps"]
    chance, shot, searched = found.values()
    assert chance.simulator_steps == 0
    assert 50 < shot.simulator_steps <= 8 * 20
    assert 50 < searched.simulator_steps <= 8 * 21 + 20  # each simulation's step and what it acted on, and the root's
    assert min(shot.mean, searched.mean) > chance.mean


def test_mppi_in_process_and_in_cpp_simulator(tmp_path):
    if not (SDK / "corral.hpp").exists() or shutil.which("g++") is None:
        pytest.skip("no C++ compiler")
    program = compile_pendulum(tmp_path)
    found = {figure.name: figure.plays[0] for figure in planners(PlanningTask(PENDULUM, 0), [1], 8, 2, program, say)}
    assert list(found)[-2:] == [MPPI, MPPI_LINK]
    for name in (MPPI, MPPI_LINK):
        assert 100 < found[name].simulator_steps <= 8 * 20
        assert found[name].mean > found["random actions"].mean


def test_missing_compiler_error_names_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "/bin/false")
    with pytest.raises(UserError, match=r"install g\+\+, or measure with --task cartpole"):
        compile_pendulum(tmp_path)


def test_search_gain_is_paired_by_episode():
    alone = figure(POLICY, None, [100, 200, 300], [100, 200, 300])
    few, many = (figure(f"search, {n} simulations", n, [110, 215, 305], [140, 240, 340]) for n in (2, 8))
    (verdict,) = verdicts([alone, few, many])
    assert verdict.contestant == "search, 8 simulations"
    assert verdict.figure.high == pytest.approx(40)
    half = 4.303 * np.std([10, 15, 5], ddof=1) / np.sqrt(3)
    assert verdict.figure.low == pytest.approx(10 - half)
    assert verdict.reached
    worse = figure("search, 8 simulations", 8, [90, 195, 290], [90, 180, 290])
    (verdict,) = verdicts([alone, worse])
    assert not verdict.reached


def test_mppi_verdicts_in_process_and_over_link():
    env = "Pendulum-v1"
    first, second = verdicts([figure(MPPI, 32, [-150, -170], env=env), figure(MPPI_LINK, 32, [-250, -210], env=env)])
    assert (first.reached, second.reached) == (True, False)
    assert "mean return: -230 (target: at least -200). Not met." in str(second)


def test_table_has_medians_ranges_and_intervals():
    found = [figure(POLICY, None, [100, 200]), figure("search, 4 simulations", 4, [300, 320], [400, 420], [500, 520])]
    head, _, alone, searched = tables(found)
    assert "410.0 (310.0 to 510.0)" in searched
    assert f"| {12.706 * np.sqrt(200) / np.sqrt(2):.1f} " in searched
    assert "2.000 (2.000 to 2.000)" in searched
    assert searched.split("|")[-2].strip() == "7.5"
    assert alone.split("|")[-2].strip() == "-"
    assert len({line.count("|") for line in (head, alone, searched)}) == 1


def test_section_has_command_machine_and_picture(tmp_path):
    pytest.importorskip("matplotlib")
    found = [
        figure(POLICY, None, [100, 200]),
        *(figure(f"search, {n} simulations", n, [100 * n, 110 * n]) for n in (2, 4)),
        figure("random actions", None, [20, 22]),
        figure(MPPI, 32, [-150, -170], env="Pendulum-v1"),
        *(figure(f"search, {n} simulations", n, [-100 * n, -110 * n], env="Pendulum-v1") for n in (2, 4)),
    ]
    save_curves(found, tmp_path / "x.png", "python -m benchmarks planning")
    assert (tmp_path / "x.png").stat().st_size > 10_000
    text = "\n".join(
        section(found, FACTS, "python -m benchmarks planning", "A machine.", "32 episodes.", "docs/planning.png")
    )
    for part in ("`python -m benchmarks planning` on 2026-11-17", "A machine.", "32 episodes.",
                 "20,000 steps of CartPole-v1", "(docs/planning.png)",
                 "- Pendulum-v1, mean return: "):  # fmt: skip
        assert part in text


def test_command_writes_table_picture_and_json(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "BENCHMARKS.md"
    path.write_text(f"before\n{MARKS[0]}\nold\n{MARKS[1]}\nafter\n")
    words = "--task cartpole --sims 2 --budget 40 --episodes 2 --seeds 1"
    done = run("planning", *words.split(), "--out", tmp_path / "o", "--table", path)
    assert done.returncode == 0, done.stderr
    text = path.read_text()
    shown = "![mean return over the number of simulations](planning.png)"
    for expected in (f"`python -m benchmarks planning {words}`", "search, 2 simulations", shown):
        assert expected in text
    assert "old" not in text
    assert text.endswith(f"{MARKS[1]}\nafter\n")
    assert (tmp_path / "planning.png").exists()
    data = json.loads((tmp_path / "o" / "planning.json").read_text())
    assert len(data["figures"]) == 5
    assert all(len(play["returns"]) == 2 for found in data["figures"] for play in found["plays"])


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--sims", "0"], "--sims must be at least 1"),
        (["--seeds", "0"], "--seeds must be at least 1"),
        (["--episodes", "1"], "--episodes must be at least 2"),
        (["--budget", "39"], "--budget must be at least 40"),
        (["--task", "chess"], "chess"),
    ],
)
def test_user_error_is_one_line(args, words):
    done = run("planning", *args)
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
