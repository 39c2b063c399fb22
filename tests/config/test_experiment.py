from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import gymnasium
import numpy as np
import pytest
import yaml

from corral.algos.registry import ALGORITHMS, AlgorithmEntry
from corral.config.experiment import Experiment
from corral.config.overrides import apply, leaves, read, split_items, to_plain
from corral.config.yaml_file import read_yaml
from corral.core.errors import UserError
from corral.envs.make import BACKENDS
from corral.envs.suites import atari, pixels
from corral.link.auth import read_token


@dataclass(frozen=True)
class Net:
    hidden: tuple[int, ...] = (64, 64)
    kind: Literal["none", "lstm", "gru"] = "none"
    scale: tuple[float, float] = (0.0, 1.0)


@dataclass(frozen=True)
class Config:
    lr: float = 3e-4
    epochs: int = 4
    anneal: bool = False
    clip: float | None = None
    size: int | Literal["auto"] = "auto"
    label: str = "x"
    every: int = 1
    net: Net = field(default_factory=Net)

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise UserError(f"lr must be above 0, got {self.lr}.")


@dataclass(frozen=True)
class Outer:
    steps: int = 10
    options: dict[str, Any] = field(default_factory=dict)
    every: int = 2
    log: Net = field(default_factory=lambda: Net(hidden=()))
    inner: Config = field(default_factory=Config)
    handle: Any = field(default=None, compare=False, metadata={"live": True})


class MyEnv(gymnasium.Env):
    """An environment with a name that can be imported."""


@pytest.fixture
def toy(monkeypatch):
    """An algorithm named toy, whose settings are Config."""
    monkeypatch.setitem(ALGORITHMS, "toy", AlgorithmEntry(__name__, "Toy", "a toy", "discrete"))


def set_one(key, value):
    return apply(Outer(), read(Outer(), {key: value}))


@pytest.mark.parametrize(
    ("key", "value", "name", "expected"),
    [
        ("steps", "1e5", "steps", 100_000),
        ("steps", "100_000", "steps", 100_000),
        ("steps", "100k", "steps", 100_000),
        ("steps", "2M", "steps", 2_000_000),
        ("steps", "1.1m", "steps", 1_100_000),
        ("steps", "1_000_000", "steps", 1_000_000),
        ("size", "1k", "inner.size", 1000),
        ("inner.hidden", "1k,16", "inner.net.hidden", (1000, 16)),
        ("steps", 1e3, "steps", 1000),
        ("steps", np.int64(7), "steps", 7),
        ("lr", "1e-3", "inner.lr", 1e-3),
        ("lr", 1, "inner.lr", 1.0),
        ("lr", np.float32(0.5), "inner.lr", 0.5),
        ("inner.lr", ".5", "inner.lr", 0.5),
        ("anneal", "on", "inner.anneal", True),
        ("anneal", "No", "inner.anneal", False),
        ("anneal", True, "inner.anneal", True),
        ("clip", "none", "inner.clip", None),
        ("clip", None, "inner.clip", None),
        ("clip", "0.2", "inner.clip", 0.2),
        ("size", "auto", "inner.size", "auto"),
        ("size", "12", "inner.size", 12),
        ("label", "12", "inner.label", "12"),
        ("label", "none", "inner.label", "none"),
        ("inner.hidden", "32,16", "inner.net.hidden", (32, 16)),
        ("inner.net.hidden", "[32, 16]", "inner.net.hidden", (32, 16)),
        ("net.hidden", "(32,)", "inner.net.hidden", (32,)),
        ("net.hidden", [8], "inner.net.hidden", (8,)),
        ("net.hidden", 8, "inner.net.hidden", (8,)),
        ("net.hidden", "", "inner.net.hidden", ()),
        ("net.kind", "LSTM", "inner.net.kind", "lstm"),
        ("net.scale", "-1,1", "inner.net.scale", (-1.0, 1.0)),
        ("every", 5, "every", 5),
        ("inner.every", 5, "inner.every", 5),
        ("options", {"a": (1, 2)}, "options", {"a": [1, 2]}),
    ],
)
def test_a_setting_is_found_by_its_name_and_read_by_its_type(key, value, name, expected):
    found = read(Outer(), {key: value})
    assert found == {name: expected}
    assert type(found[name]) is type(expected)
    target = apply(Outer(), found)
    for part in name.split("."):
        target = getattr(target, part)
    assert target == expected


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("lrr", 1, ["No setting 'lrr'", "did you mean lr?"]),
        ("inner.nett.hidden", 1, ["No setting 'inner.nett.hidden'", "hidden"]),
        ("total_timesteps", 1, ["it is called steps here"]),
        ("zzz", 1, ["the settings are steps, options, every"]),
        ("hidden", "1", ["log.hidden or inner.net.hidden"]),
        ("net", 3, ["net is a group", "inner.net.hidden"]),
        ("handle", 3, ["No setting 'handle'"]),
        ("steps", True, ["steps must be an integer, got True"]),
        ("steps", "1.5", ["steps must be an integer, got '1.5'"]),
        ("steps", "inf", ["an integer"]),
        ("steps", "k", ["an integer"]),
        ("steps", "1.0001k", ["an integer"]),
        ("steps", "5kk", ["an integer"]),
        ("steps", None, ["an integer", "got None"]),
        ("lr", "fast", ["inner.lr must be a number, got 'fast'"]),
        ("lr", "nan", ["a number"]),
        ("lr", False, ["a number, got False"]),
        ("lr", [1.0], ["a number"]),
        ("anneal", 1, ["inner.anneal must be true or false, got 1"]),
        ("anneal", "maybe", ["true or false"]),
        ("clip", "x", ["a number or none"]),
        ("label", 3, ["inner.label must be a string, got 3"]),
        ("net.kind", "rnn", ["inner.net.kind must be none, lstm or gru, got 'rnn'"]),
        ("net.hidden", "64,a", ["a list such as 64,64"]),
        ("net.hidden", "64.5", ["an integer"]),
        ("net.scale", "1", ["a list"]),
        ("options", "a=1", ["a mapping"]),
        ("options", {"a": object()}, ["a mapping"]),
        ("lr", np.ones(2), ["a number"]),
        ("lr", -1, ["lr must be above 0"]),
    ],
)
def test_mistake_is_one_line_with_remedy(key, value, words):
    with pytest.raises(UserError) as caught:
        set_one(key, value)
    for word in words:
        assert word in str(caught.value)


def test_a_setting_that_is_given_twice_is_refused():
    with pytest.raises(UserError, match=r"inner\.lr is set twice"):
        read(Outer(), {"lr": 1, "inner": {"lr": 2}})
    with pytest.raises(UserError, match="twice"):
        split_items(["lr=1", "lr=2"])
    with pytest.raises(UserError, match="key=value"):
        split_items(["lr"])


def test_final_value_is_validated():
    broken_for_a_while = read(Outer(), {"lr": -1}) | read(Outer(), {"lr": 1})
    assert apply(Outer(), broken_for_a_while).inner.lr == 1


def test_plain_values_hold_every_setting_and_no_live_object():
    outer = replace(Outer(), handle=object(), options={"a": 1})
    plain = to_plain(outer)
    assert "handle" not in plain
    assert plain["inner"]["net"]["hidden"] == [64, 64]
    assert set(leaves(outer)) == set(read(outer, plain))
    assert apply(Outer(), read(Outer(), plain)) == outer


@pytest.mark.parametrize("text", ["lr: 1\nsteps: 2\nlr: 3", "inner: {lr: 1, lr: 1}"])
def test_a_setting_that_a_file_names_twice_is_refused(tmp_path, text):
    (tmp_path / "f.yaml").write_text(text)
    with pytest.raises(UserError, match=r"f\.yaml is not valid YAML in line \d: lr is set twice\.$"):
        read_yaml(tmp_path / "f.yaml")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lr: [1\nsteps: 2", ["is not valid YAML in line 2"]),
        ("a: \tb: c", ["is not valid YAML in line 1"]),
        ("- lr\n- steps", ["`name: value` lines"]),
        ("just words", ["`name: value` lines"]),
        ("3: 4", ["`name: value` lines"]),
        (None, ["Cannot read", "No such file"]),
    ],
)
def test_a_file_that_holds_no_settings_is_named(tmp_path, text, words):
    path = tmp_path / "f.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError) as caught:
        read_yaml(path)
    for word in ["f.yaml", *words]:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "# nothing\n", "inner:\n", "inner: {net: }\n"])
def test_a_file_whose_settings_are_commented_out_changes_nothing(tmp_path, text):
    (tmp_path / "f.yaml").write_text(text)
    assert read(Outer(), read_yaml(tmp_path / "f.yaml")) == {}


@pytest.mark.parametrize("text", ["inner: {nett: {}}", "nett:", "inner: {lrr: 1}"])
def test_unknown_setting_in_file_names_the_file(toy, tmp_path, text):
    (tmp_path / "f.yaml").write_text(text.replace("inner", "algorithm"))
    with pytest.raises(UserError, match=r"f\.yaml: No setting"):
        Experiment.make("toy", "CartPole-v1", config_file=tmp_path / "f.yaml")


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_every_setting_of_every_algorithm_survives_yaml_and_json(algo):
    made = Experiment.make(
        algo,
        "CartPole-v1",
        overrides={"net.hidden_sizes": "8,8", "learning_rate": 1e-5, "workers": 2, "env_kwargs": {"sutton": True}},
    )
    plain = made.to_dict()
    assert Experiment.from_dict(yaml.safe_load(yaml.safe_dump(plain))) == made
    assert Experiment.from_dict(json.loads(json.dumps(plain))) == made
    assert Experiment.from_dict(plain).to_dict() == plain
    inner = getattr(made.algorithm, "ppo", made.algorithm)  # ppo-search has ppo's settings in a group
    assert (inner.net.hidden_sizes, inner.learning_rate) == ((8, 8), 1e-5)


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_every_setting_can_be_written_as_text(algo):
    made = Experiment.make(algo, "CartPole-v1")
    words = {name: _as_text(made, name) for name in leaves(made) if name != "preset"}
    again = Experiment.from_dict({"algo": algo, **words, "preset": made.preset})
    assert again == made


def _as_text(config, name):
    for part in name.split("."):
        config = getattr(config, part)
    if isinstance(config, dict):
        return json.dumps(config)
    return ",".join(map(str, config)) if isinstance(config, tuple) else str(config)


def test_caller_overrides_file_overrides_preset(tmp_path):
    path = tmp_path / "f.yaml"
    path.write_text("algorithm: {learning_rate: 5e-3}\ngamma: 0.5\nnum_envs: 3\n")
    preset = Experiment.make("ppo", "CartPole-v1")
    default = Experiment.make("ppo", "CartPole-v1", preset="none")
    made = Experiment.make("ppo", "CartPole-v1", config_file=path, overrides={"gamma": 0.7})
    assert (preset.preset, default.preset, made.preset) == ("CartPole-v1", "none", "CartPole-v1")
    assert preset.algorithm.update_epochs != default.algorithm.update_epochs
    assert made.algorithm.update_epochs == preset.algorithm.update_epochs
    assert (made.num_envs, made.algorithm.learning_rate, made.algorithm.gamma) == (3, 5e-3, 0.7)


def test_the_config_of_a_run_makes_the_same_run_again(tmp_path):
    made = Experiment.make("ppo", "CartPole-v1", overrides={"steps": 777, "env_kwargs": {"sutton_barto_reward": True}})
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(made.to_dict()))
    assert Experiment.make("ppo", config_file=tmp_path / "config.yaml") == made
    elsewhere = Experiment.make("ppo", "Acrobot-v1", config_file=tmp_path / "config.yaml")
    assert (elsewhere.env, elsewhere.env_kwargs, elsewhere.steps) == ("Acrobot-v1", {}, 777)
    with pytest.raises(UserError, match=r"config\.yaml is for ppo, not for dqn"):
        Experiment.make("dqn", config_file=tmp_path / "config.yaml")


def test_backends_are_those_of_make_vec():
    for backend in BACKENDS:
        assert Experiment.make("ppo", "CartPole-v1", overrides={"backend": backend}).backend == backend


def test_default_evaluation_interval_is_a_tenth():
    assert Experiment.make("ppo", "CartPole-v1", overrides={"steps": 1000}).eval_interval == 100
    assert Experiment.make("ppo", "CartPole-v1", overrides={"steps": 3}).eval_interval == 1
    assert Experiment.make("ppo", "CartPole-v1", overrides={"eval_every": 7}).eval_interval == 7


def again(made):
    return Experiment.from_dict(made.to_dict())


def test_a_callable_that_can_be_imported_is_stored_by_name(toy):
    made = Experiment.make("toy", MyEnv)
    assert made.env == f"{__name__}:MyEnv"
    assert again(made).environment() == (made.env, {})


def test_local_callable_runs_here_and_fails_elsewhere(toy):
    def build():
        return MyEnv()

    for env in (build, lambda: MyEnv()):
        made = Experiment.make("toy", env)
        assert made.environment() == (env, {})
        with pytest.raises(UserError, match=r"<.*>.*cannot be rebuilt"):
            again(made).environment()


def test_suites_are_stored_with_their_options(toy):
    pytest.importorskip("ale_py")
    for suite in (atari("Pong"), atari("ms_pacman", stack=2, sticky=0.25), pixels("CartPole-v1", size=42)):
        made = Experiment.make("toy", suite)
        assert again(made).environment() == (suite, {})
    assert Experiment.make("toy", atari("ms_pacman")).env == "ALE/MsPacman-v5"
    assert Experiment.make("toy", "ALE/Pong-v5").environment() == (atari("Pong"), {})
    with pytest.raises(UserError, match="no option size_"):
        Experiment.make("toy", "ALE/Pong-v5", overrides={"env_kwargs": {"size_": 3}})
    with pytest.raises(UserError, match="already includes its options"):
        Experiment.make("toy", atari("Pong", stack=2), overrides={"env_kwargs": {"stack": 3}})


@pytest.mark.parametrize("env", [3, [MyEnv], MyEnv()])
def test_invalid_env_is_refused(toy, env):
    with pytest.raises(UserError):
        Experiment.make("toy", env)


def test_the_default_folder_is_new_and_named_for_the_run(toy, tmp_path):
    made = Experiment.make("toy", "CartPole-v1", overrides={"seed": 3})
    first = made.default_run_dir(tmp_path)
    assert first == tmp_path / "toy-CartPole-v1-3-1"
    first.mkdir()
    assert made.default_run_dir(tmp_path) == tmp_path / "toy-CartPole-v1-3-2"
    assert Experiment.make("toy", MyEnv).default_run_dir(tmp_path).name == "toy-MyEnv-0-1"
    assert Experiment.make("toy", "tcp://127.0.0.1:5555").default_run_dir(tmp_path).name == "toy-tcp-127.0.0.1-5555-0-1"
    launched = Experiment.make("toy", "zmq://127.0.0.1:0", overrides={"env_kwargs": {"sim": "./build/cartpole"}})
    assert launched.default_run_dir(tmp_path).name == "toy-cartpole-0-1"
    assert Experiment.make("toy", lambda: MyEnv()).default_run_dir(tmp_path).parent == tmp_path


@pytest.mark.parametrize("text", ["8:32", "1:0.5", "0.2:0", "1:0.1@0.3", "190:20:30"])
def test_schedules_in_yaml_are_text(tmp_path, text):
    (tmp_path / "f.yaml").write_text(f"num_simulations: {text}\nnum_envs: 8\ngamma: 0.5\n")
    assert read_yaml(tmp_path / "f.yaml") == {"num_simulations": text, "num_envs": 8, "gamma": 0.5}


def test_token_file_is_stored_with_its_full_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = Experiment.make("ppo", "tcp://127.0.0.1:1", overrides={"env_kwargs": {"token_file": "token"}})
    assert made.env_kwargs == {"token_file": str(tmp_path / "token")}
    assert Experiment.from_dict(made.to_dict() | {"env_kwargs": {"token_file": "token"}}).env_kwargs == {
        "token_file": "token"
    }
    with pytest.raises(UserError, match=f"The token file {tmp_path / 'token'} cannot be read"):
        read_token("token")
