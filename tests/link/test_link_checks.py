"""`corral check-env URL` finds what simulators get wrong, and names it."""

import json
import subprocess
from functools import partial
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
from helpers.own_dice import DeclaredGuess, ReseededGuess
from helpers.sims import Sim, free_url

from corral.cli.main import main
from corral.link import protocol as clp
from corral.testing import check_env
from corral.testing.checks import link as link_checks
from corral.testing.checks.link import check_memory

CHECKS = [
    "connect", "spaces", "observations", "determinism", "episode ends", "bad requests", "save and load", "expand",
    "random numbers", "memory", "export", "speed",
]  # fmt: skip


class Walk(gymnasium.Env):
    """A random walk of 30 steps that can be saved; `wrong` says what it gets wrong."""

    def __init__(self, wrong=""):
        self.observation_space = gymnasium.spaces.Box(-500, 500, (2,), np.float64)
        self.action_space = gymnasium.spaces.Discrete(3)
        self.wrong, self._since_start = wrong, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if self.wrong == "unseeded":
            self._np_random = np.random.default_rng()
        self._x, self._t, self._shown = float(self.np_random.normal()), 0, None
        return self._obs(), {}

    def step(self, action):
        self._since_start += 1
        self._x += float(action - 1) + 0.1 * self.np_random.normal()
        self._t += 1
        if self.wrong == "left over":
            self._x += 1e-9 * self._since_start
        if self.wrong == "outside" and self._t == 5:
            self._x = 1000.0
        if self.wrong == "raises" and self._t == 9:
            raise RuntimeError("the joint exploded")
        return self._obs(), self._x, self._t >= (10**9 if self.wrong == "endless" else 30), False, {}

    def _obs(self):
        return np.array([self._x, self._t])

    def state_dict(self):
        state = {"x": self._x, "t": self._t, "rng": self.np_random.bit_generator.state}
        return {key: value for key, value in state.items() if f"forgets {key}" != self.wrong}

    def load_state_dict(self, state):
        self._x = state.get("x", self._x)
        self._t = state.get("t", self._t)
        if "rng" in state:
            self.np_random.bit_generator.state = state["rng"]


class KeyWalk(Walk):
    """Saves where it is, but neither its generator nor a gust that steps build up."""

    state_dict = load_state_dict = None

    def reset(self, *, seed=None, options=None):
        self._gust = 0.0
        return super().reset(seed=seed, options=options)

    def step(self, action):
        self._gust += 0.25
        self._x += self._gust
        return super().step(action)

    def get_key_state(self):
        return {"x": self._x, "t": self._t}

    def set_key_state(self, state):
        self._x, self._t = state["x"], state["t"]


@pytest.fixture(autouse=True)
def _measure_speed_briefly(monkeypatch):
    monkeypatch.setattr(link_checks, "_SPEED_S", 0.1)


@pytest.fixture
def serve():
    sims = []

    def start(wrong="", **options):
        url = free_url()
        sims.append(Sim(KeyWalk if wrong == "key" else partial(Walk, wrong), url, **options))
        return url

    yield start
    for sim in sims:
        sim.end()


def results(url):
    return {result.name: result for result in check_env(url, steps=200)}


def test_a_good_simulator_passes_every_check(serve):
    found = results(serve())
    assert list(found) == CHECKS
    assert {result.status for result in found.values()} == {"pass"}, found
    assert found["speed"].facts["level"] == 4


@pytest.mark.parametrize(
    ("wrong", "check", "status", "words"),
    [
        ("unseeded", "determinism", "fail", "with the same seed and actions, step 0"),
        ("left over", "determinism", "fail", "does not reset the whole state"),
        ("outside", "observations", "fail", "outside its space"),
        ("raises", "observations", "fail", "the joint exploded"),
        ("endless", "observations", "warn", "may never end"),
        ("forgets rng", "save and load", "fail", "differs in its"),
        ("forgets x", "save and load", "fail", "differs in its"),
        ("forgets t", "save and load", "fail", "differs in its"),
    ],
)
def test_each_fault_is_found_by_its_check_and_named(serve, wrong, check, status, words):
    found = results(serve(wrong))
    assert found[check].status == status, found
    assert words in found[check].detail


@pytest.mark.parametrize(("kind", "status", "words"), [
    (DeclaredGuess, "fail", "chance seeds do not change them"), (ReseededGuess, "pass", "none were found"),
])  # fmt: skip
def test_foreseen_dice_are_found(kind, status, words):
    url = free_url()
    sim = Sim(kind, url)
    found = results(url)["random numbers"]
    sim.end()
    assert found.status == status, found
    assert words in found.detail


def test_foreseen_dice_of_a_cpp_simulator_are_found(built):
    url = free_url()
    sim = subprocess.Popen([built / "guess", "--connect", url])
    found = results(url)["random numbers"]
    sim.kill()
    sim.wait()
    assert found.status == "fail", found
    assert "write reseed()" in found.detail


def test_key_state_simulator_passes_with_warnings(serve):
    url = serve("key")
    found = results(url)
    assert "fail" not in {result.status for result in found.values()}, found
    assert found["expand"].status == "warn"
    assert "from its child and the same step after a LOAD differ" in found["expand"].detail
    assert "only a key state is saved" in found["expand"].detail


class Unhurried:
    """States of a simulator that drops them when the next request that names states has come, as it may."""

    level = 2

    def __init__(self):
        self._kept, self._dropped = [], False

    def reset(self, slots, seeds):
        pass

    def save(self, slots):
        self._kept.append(len(self._kept) + 1)
        return np.array(self._kept[-1:]), None

    def next_generation(self):
        self._dropped = True

    def load(self, slots, ids):
        self._kept = [] if self._dropped else self._kept
        return SimpleNamespace(status=[0 if ids[0] in self._kept else clp.Status.E_UNKNOWN_STATE])

    def stats(self):
        return {"snapshots": len(self._kept), "snapshot_bytes": 8 * len(self._kept)}


def test_memory_check_allows_late_drops():
    subject = SimpleNamespace(states=Unhurried(), slots=np.arange, seed=1, facts={})
    assert check_memory(subject) == ("pass", "a state takes 8 bytes; dropped states take none")


def test_check_env_command_report_and_exit_code(serve, tmp_path, capfd):
    report = tmp_path / "report.json"
    assert main(["check-env", serve("forgets rng"), "--json", str(report), "--steps", "100"]) == 1
    assert "fail  save and load" in capfd.readouterr().out
    read = json.loads(report.read_text())
    assert read["passed"] is False
    assert [check["name"] for check in read["checks"]] == CHECKS
    assert read["facts"]["single_rows_per_s"] > 0
    assert main(["check-env", serve(), "--steps", "100"]) == 0


def test_check_env_of_wrong_url_is_exit_code_2(capfd):
    assert main(["check-env", "tcp://127.0.0.1:99999"]) == 2
    assert "is not tcp://HOST:PORT" in capfd.readouterr().err
