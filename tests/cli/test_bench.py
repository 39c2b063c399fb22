"""`corral bench` on environments and simulators of the user."""

from __future__ import annotations

import json

import pytest
from helpers.faulty_envs import FailsAfter, Good, Raising
from helpers.sims import Sim, free_url

import corral
from corral.cli.bench import advice, bound
from corral.cli.main import main
from corral.testing.speed import CORRAL, ENVIRONMENT, IPC, WIRE, Measurement, Speed, _lockstep

SHORT = ["--seconds", "0.1"]


def run(*args):
    return main(["bench", *args, *SHORT])


def report(path):
    return json.loads(path.read_text())


def test_gymnasium_id_has_every_backend(tmp_path, capfd):
    assert run("CartPole-v1", "--num-envs", "4", "--json", str(tmp_path / "speed.json")) == 0
    text = capfd.readouterr().out
    for part in ("the environment alone", "local", "process, ", "us/step", "IPC", "Bottleneck:", "Suggestion: --set b"):
        assert part in text
    found = report(tmp_path / "speed.json")["measurements"]
    assert [each["backend"] for each in found][:3] == ["none", "local", "process"]
    assert [each["num_envs"] for each in found][:3] == [1, 4, 4]
    assert all(each["steps_per_s"] > 0 for each in found)
    assert set(found[2]["layers"]) == {ENVIRONMENT, CORRAL, IPC}


def test_own_class_with_arguments(tmp_path, capfd):
    path = tmp_path / "speed.json"
    assert run("helpers.faulty_envs:Good", "--num-envs", "2", "--env-kwargs", "length=3", "--json", str(path)) == 0
    assert "Not measured: native: " in capfd.readouterr().out
    assert [each["backend"] for each in report(path)["measurements"]] == ["none", "local", "process"]


@pytest.mark.parametrize("counted", [True, False])
def test_environment_that_waits_gets_a_worker_each(tmp_path, monkeypatch, counted):
    if not counted:  # as on Windows
        monkeypatch.setattr("corral.testing.speed._voluntary_switches", lambda: None)
    path = tmp_path / "speed.json"
    assert run("corral.testing.envs:SlowEnv", "--num-envs", "3", "--json", str(path)) == 0
    processes = [each["workers"] for each in report(path)["measurements"] if each["backend"] == "process"]
    assert processes[-1] == 3


@pytest.fixture
def serve():
    sims = []

    def start(scheme, slots, **options):
        url = free_url(scheme)
        sims.append(Sim(Good, url, slots=slots, **options))
        return url

    yield start
    for sim in sims:
        sim.end()


@pytest.mark.parametrize("scheme", ["tcp", "zmq"])
def test_url_has_one_and_several_environments(serve, tmp_path, capfd, scheme):
    path = tmp_path / "speed.json"
    assert run(serve(scheme, 4), "--json", str(path)) == 0
    assert "over the link" in capfd.readouterr().out
    found = report(path)["measurements"]
    assert [(each["backend"], each["num_envs"]) for each in found] == [("link", 1), ("link", 3)]
    assert set(found[0]["layers"]) == {ENVIRONMENT, CORRAL, WIRE}


def test_url_with_all_environments_of_the_simulator(serve, tmp_path):
    path = tmp_path / "speed.json"
    assert run(serve("tcp", 4), "--num-envs", "4", "--json", str(path)) == 0
    assert [each["num_envs"] for each in report(path)["measurements"]] == [1, 4]


def test_url_with_room_for_one(serve, capfd):
    assert run(serve("tcp", 1)) == 0
    assert "Not measured: more environments: the simulator has one slot." in capfd.readouterr().out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["CartPole-v9"], "CartPole-v9"),
        (["nowhere:Env"], "nowhere"),
        (["http://127.0.0.1:1"], "http"),
        (["CartPole-v1", "--num-envs", "0"], "--num-envs must be at least 1, got 0."),
        (["CartPole-v1", "--workers", "-1"], "--workers must be at least 1, got -1."),
        (["corral/TicTacToe-v0"], "has an action mask"),
        (["CartPole-v1", "--num-envs", "2", "--json", "/nowhere/speed.json"], "cannot be written to /nowhere"),
        ([], "ENV|URL"),
    ],
)
def test_user_error_is_one_line(args, message, capfd):
    assert run(*args) == 2
    errors = capfd.readouterr().err
    assert message in errors
    assert errors.count("\n") == 1


@pytest.mark.parametrize("seconds", ["0", "nan", "1e9"])
def test_seconds_are_bounded(seconds, capfd):
    assert main(["bench", "CartPole-v1", "--seconds", seconds]) == 2
    assert "--seconds must be positive and at most 3600" in capfd.readouterr().err


def test_environment_that_raises_is_named(capfd):
    assert run(f"helpers.faulty_envs:{Raising.__name__}") == 1
    assert "the joint exploded" in capfd.readouterr().err


def test_failed_steps_are_reported_and_do_not_count(tmp_path, capfd):
    path = tmp_path / "speed.json"
    options = ["--num-envs", "2", "--seconds", "0.5", "--json", str(path)]
    assert main(["bench", "helpers.faulty_envs:FailsAfter", *options]) == 0
    found = {each["backend"]: each["faults"] for each in report(path)["measurements"]}
    assert found["none"] == 0
    text = capfd.readouterr().out
    assert found["local"] > 0
    assert f"Faults: local, 2 environments: {found['local']:,} steps failed and do not count." in text


def test_a_faulty_row_is_not_a_step():
    with corral.make_vec(FailsAfter, 2, "local", env_kwargs={"steps": 3}) as vec:
        step = _lockstep(vec, vec.recv().env_ids)
        assert [step() for _ in range(6)] == [(2, 0), (2, 0), (0, 2)] * 2


def timed(backend, num_envs, workers, **layers):
    return Measurement(backend, num_envs, workers, [(1_000_000, sum(layers.values()), 0.0)], layers)


ALONE, LOCAL = timed("none", 1, 1, environment=20.0), timed("local", 8, 1, environment=20.0, Corral=5.0)


@pytest.mark.parametrize(
    ("best", "waits", "limit", "change"),
    [
        (LOCAL, False, "the environment itself, 20.0 of 25.0 us per step", "--set backend=local num_envs=8."),
        (timed("local", 64, 1, environment=2.0, Corral=8.0), False, "Corral's stepping, checks and copies, 8.0 of 10.0",
         "--set backend=local num_envs=64, 2.5 times the rate of local with 8."),
        (timed("process", 64, 2, environment=9.0, Corral=1.0, IPC=2.5), False, "the environment itself on ",
         "--set backend=process workers=2 num_envs=64, 2.0 times the rate of local with 8."),
        (timed("process", 8, 8, environment=9.0, Corral=1.0, IPC=2.5), True, "more workers than cores help",
         "--set backend=process workers=8 num_envs=8"),
        (timed("process", 8, 2, environment=2.0, Corral=1.0, IPC=7.0), False, "messages between processes, 7.0 of 10.0",
         "--set backend=process workers=2 num_envs=8"),
    ],
)  # fmt: skip
def test_bound_and_advice_follow_the_fastest_backend(best, waits, limit, change):
    speed = Speed("mine", list({id(each): each for each in (ALONE, LOCAL, best)}.values()), waits=waits)
    assert limit in bound(speed)
    assert advice(speed).startswith(change)


@pytest.mark.parametrize(
    ("process_us", "text"),
    [
        (22.0, "; worker processes gain 14%."),
        (30.0, "; worker processes cost more than they gain here."),
        (None, "step."),
    ],
)
def test_bound_says_of_processes_what_the_rates_show(process_us, text):
    others = [] if process_us is None else [timed("process", 8, 2, environment=10.0, IPC=process_us - 10.0)]
    speed = Speed("mine", [ALONE, LOCAL, *others])
    assert speed.best is LOCAL
    assert bound(speed).endswith(text)


def test_fewest_environments_among_similar_rates():
    many = timed("local", 64, 1, environment=20.0, Corral=3.0)
    assert Speed("mine", [ALONE, LOCAL, many]).best is LOCAL


def test_native_version_is_a_hint_alone():
    speed = Speed("mine", [ALONE, LOCAL, *(Measurement("native", 8, 2, [(1_000_000, s, 0.0)]) for s in (9.0, 5.0))])
    assert speed.best is LOCAL
    assert advice(speed).endswith("backend=native, a different implementation, is 5.0 times as fast.")


@pytest.mark.parametrize(
    ("layers", "limit", "change"),
    [
        (
            {"environment": 9.0, "Corral": 1.0, "wire": 1.0},
            "the simulator's own step",
            "more simulators make it faster",
        ),
        ({"environment": 1.0, "Corral": 1.0, "wire": 9.0}, "the link, messages and waiting", "--set num_envs=32"),
        ({"environment": 1.0, "Corral": 9.0, "wire": 1.0}, "Corral's stepping", "the link is not the bottleneck"),
    ],
)
def test_bound_and_advice_over_the_link(layers, limit, change):
    speed = Speed("tcp://x:1", [timed("link", 1, 1, environment=90.0), timed("link", 8, 1, **layers)])
    assert limit in bound(speed)
    assert change in advice(speed)


def test_results_file_is_checked_before_measuring(tmp_path, capsys):
    assert run("CartPole-v1", "--json", str(tmp_path / "none" / "x.json")) == 2
    out, err = capsys.readouterr()
    assert (out, "choose a folder that exists" in err) == ("", True)
