"""`corral eval`, `corral record` and `corral export` on runs that are there."""

import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import gymnasium
import numpy as np
import pytest

import corral
from corral.cli.eval import Eval
from corral.cli.export import Export
from corral.cli.options import parse
from corral.cli.record import Record
from corral.core.errors import UserError
from corral.envs.suites import pixels
from corral.runs.load import load_policy
from corral.runs.views.video import record_policy

HERE = Path(__file__).parent
PPO = {
    "num_envs": 2,
    "precision": "fp32",
    "preset": "none",
    "quiet": True,
    "num_steps": 16,
    "num_minibatches": 1,
    "eval_episodes": 3,
}
ENVS = '''
import gymnasium, numpy as np
from gymnasium import spaces
class Blind(gymnasium.Env):
    observation_space, action_space = spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(2)
    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(2, np.float32), {}
    def step(self, action):
        self.t += 1
        return np.zeros(2, np.float32), 1.0, self.t >= 5, False, {}
class Odd(Blind):
    """Frames of odd sizes, whose brightness tells the step."""
    metadata = {"render_modes": ["rgb_array"], "render_fps": 8}
    def __init__(self, render_mode=None):
        self.render_mode = render_mode
    def render(self):
        return np.full((33, 41, 3), 40 * self.t, np.uint8)
class Wrong(Odd):
    def render(self):
        return [[1, 2]]
class Growing(Odd):
    def render(self):
        return np.zeros((32 + self.t, 32, 3), np.uint8)
'''


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    (root / "film_envs.py").write_text(ENVS)
    corral.train("ppo", "CartPole-v1", 192, 5, root / "cartpole", **PPO, eval_every=64, log_every=1)
    sys.path.insert(0, str(root))
    try:
        for name in ("Blind", "Odd", "Wrong", "Growing"):
            corral.train("ppo", f"film_envs:{name}", 32, 5, root / name, **PPO)
        yield root
    finally:
        sys.path.remove(str(root))


def corral_command(*args):
    return subprocess.run(
        [sys.executable, "-m", "corral", *map(str, args)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), *sys.path[1:]])},
    )


def run(command, *args):
    return parse(command, list(map(str, args)), "corral").run()


def frames_of(path):
    import imageio_ffmpeg

    reader = imageio_ffmpeg.read_frames(str(path))
    facts = next(reader)
    width, height = facts["size"]
    return facts, [np.frombuffer(frame, np.uint8).reshape(height, width, 3) for frame in reader]


def test_public_functions_do_what_the_commands_do(runs, tmp_path, capsys):
    path = runs / "cartpole"
    run(Eval, path, "--episodes", 2, "--seed", 3, "--json")
    printed = json.loads(capsys.readouterr().out)
    for kind in ("deterministic", "sampled"):
        found = corral.evaluate(path, episodes=2, seed=3, deterministic=kind == "deterministic")
        assert found.to_json() == printed[kind]
    assert len(corral.evaluate(str(path), env=lambda: gymnasium.make("CartPole-v0"), episodes=3).returns) == 3
    with pytest.raises(UserError, match="this run was trained on"):
        corral.evaluate(path, env="MountainCar-v0")
    with pytest.raises(UserError, match="episodes must be at least 1"):
        corral.evaluate(path, episodes=0)
    video = corral.record(path, tmp_path / "a.mp4", seconds=0.2)
    assert (video, video.stat().st_size > 500) == (tmp_path / "a.mp4", True)
    curve = corral.plot(path, tmp_path / "curve.png", metric="train/episodes")
    assert (curve, curve.stat().st_size > 1000) == (tmp_path / "curve.png", True)
    assert (tmp_path / "curve.csv").exists()


def test_eval_repeats_recorded_evaluation(runs, capsys):
    loaded = load_policy(runs / "cartpole")
    assert run(Eval, runs / "cartpole", "--seed", loaded.experiment.seed, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    recorded = loaded.evaluation
    assert found["deterministic"] == {k: recorded[k] for k in found["deterministic"]}
    with open(runs / "cartpole" / "metrics.csv") as file:
        rows = [row for row in csv.DictReader(file) if row.get("eval/return_sampled")]
    at_best = [row for row in rows if int(row["env_steps"]) == found["step"]]
    assert float(at_best[0]["eval/return"]) == found["deterministic"]["mean"]
    assert float(at_best[0]["eval/return_sampled"]) == found["sampled"]["mean"]


def test_best_checkpoint_is_reported_on_other_seeds(tmp_path):
    result = corral.train(
        "ppo", "CartPole-v1", 2000, 1, tmp_path / "run", quiet=True, backend="local", eval_episodes=3, eval_every=500
    )
    best = load_policy(tmp_path / "run")
    assert (result.best_step, result.eval_episodes) == (best.evaluation["step"], 3)
    assert result.best_return == best.evaluation["mean"]
    again = corral.evaluate(tmp_path / "run", episodes=3)
    assert result.best_report == again.mean
    assert not set(again.returns) <= set(best.evaluation["returns"])


def test_eval_prints_a_table(runs, capsys):
    run(Eval, runs / "cartpole", "--episodes", 4)
    title, head, deterministic, sampled, recorded = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"ppo on CartPole-v1, checkpoint of step \d+, 4 episodes of each kind", title)
    assert head.split() == ["actions", "mean", "return", "std", "95", "%", "interval", "min", "max", "length"]
    for line, name in ((deterministic, "deterministic"), (sampled, "sampled")):
        assert re.match(rf"{name} +[\d.]+ +[\d.]+ +-?[\d.]+ to [\d.]+ +[\d.]+ +[\d.]+ +\d+ \(\d+ to \d+\)", line)
    assert re.fullmatch(r"Recorded by the run: mean return [\d.]+ over 3 episodes, deterministic", recorded)


def test_eval_options(runs, capsys):
    def played(*args):
        run(Eval, runs / "cartpole", "--json", *args)
        return json.loads(capsys.readouterr().out)

    one = played("--sampled", "--episodes", 20, "--seed", 1)
    assert "deterministic" not in one
    assert len(one["sampled"]["returns"]) == 20
    assert one == played("--sampled", "--episodes", 20, "--seed", 1)
    assert one != played("--sampled", "--episodes", 20, "--seed", 2)
    assert set(played("--deterministic", "--episodes", 1)) == {"run", "step", "deterministic"}
    assert played("--checkpoint", "latest", "--episodes", 1)["step"] == 192


def test_eval_shows_the_games_on_a_screen(runs, capsys, monkeypatch):
    import pygame

    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    shown = []
    flip = pygame.display.flip
    monkeypatch.setattr(pygame.display, "flip", lambda: (shown.append(1), flip()))
    run(Eval, runs / "cartpole", "--render", "--episodes", 1, "--json")
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["run", "step", "deterministic"]
    assert len(shown) >= found["deterministic"]["lengths"][0]


def test_without_a_screen_eval_names_record(runs, monkeypatch):
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    with pytest.raises(UserError, match=r"no display.*`corral record`"):
        run(Eval, runs / "cartpole", "--render")


def test_a_video_has_a_frame_at_the_start_and_one_per_step(runs, tmp_path, capsys):
    run(Record, runs / "Odd", "-o", tmp_path / "deep" / "odd.mp4", "--episodes", 2)
    assert capsys.readouterr().out == (f"Wrote {tmp_path}/deep/odd.mp4: 12 frames, 1.5 s at 8 fps, return 5, 5\n")
    facts, frames = frames_of(tmp_path / "deep" / "odd.mp4")
    assert (facts["codec"], facts["size"], facts["fps"]) == ("h264", (42, 34), 8.0)
    assert facts["pix_fmt"].startswith("yuv420p")
    assert len(frames) == 12
    levels = [frame.mean() for frame in frames]
    np.testing.assert_allclose(levels, [40 * t for t in range(6)] * 2, atol=6)
    assert os.listdir(tmp_path / "deep") == ["odd.mp4"]


def test_cartpole_is_filmed_without_a_screen(runs, tmp_path):
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        os.environ.pop(name, None)
    done = corral_command("record", runs / "cartpole", "-o", tmp_path / "a.mp4", "--fps", 25)
    assert done.returncode == 0, done.stderr
    steps = load_policy(runs / "cartpole").evaluation["lengths"][0]
    assert f"{steps + 1} frames" in done.stdout
    facts, frames = frames_of(tmp_path / "a.mp4")
    assert (len(frames), facts["size"], facts["fps"]) == (steps + 1, (600, 400), 25.0)
    assert frames[0].std() > 10  # something is drawn


def test_a_video_ends_after_so_many_seconds(runs, tmp_path, capsys):
    run(Record, runs / "Odd", "-o", tmp_path / "a.mp4", "--episodes", 100, "--seconds", 2, "--sampled")
    assert "16 frames, 2.0 s at 8 fps, return 5, 5; stopped at --seconds 2" in capsys.readouterr().out


def test_pixels_are_filmed_in_full(tmp_path):
    corral.train("ppo", pixels("CartPole-v1", size=36), 32, 0, tmp_path / "run", **PPO)
    loaded = load_policy(tmp_path / "run")
    film = record_policy(loaded.experiment, loaded.as_policy(), tmp_path / "a.mp4")
    facts, frames = frames_of(film.path)
    assert (len(frames), facts["size"]) == (film.returns[0] + 1, (600, 400))


def test_atari_is_filmed_at_the_speed_of_the_console(tmp_path):
    pytest.importorskip("ale_py")
    settings = PPO | {"num_steps": 4, "eval_episodes": 0}
    corral.train("ppo", "ALE/Breakout-v5", 8, 0, tmp_path / "run", **settings)
    loaded = load_policy(tmp_path / "run")
    assert loaded.evaluation is None
    film = record_policy(loaded.experiment, loaded.as_policy(deterministic=False), tmp_path / "a.mp4", seconds=2)
    facts, frames = frames_of(film.path)
    assert (facts["size"], facts["fps"], film.fps) == ((160, 210), 15.0, 15.0)
    assert len(frames) == film.frames >= 30
    assert frames[0].std() > 5


@pytest.mark.parametrize(
    ("command", "args", "words"),
    [
        (Record, ["cartpole", "-o", "a.avi"], "must end in .mp4 or .gif, got a.avi"),
        (Record, ["cartpole", "--episodes", "0"], "episodes must be above 0"),
        (Record, ["cartpole", "--seed", "-1"], "seed must be at least 0"),
        (Record, ["Blind", "-o", "a.mp4"], "film_envs:Blind takes no render_mode"),
        (Record, ["Wrong", "-o", "a.mp4"], "Wrong cannot be recorded: with render_mode='rgb_array'"),
        (Record, ["Growing", "-o", "a.mp4"], "must have the same size"),
        (Record, ["Odd", "-o", "film_envs.py/a.mp4"], "cannot be written"),
        (Eval, ["nowhere"], "no run at nowhere"),
        (Eval, ["cartpole", "--episodes", "0"], "--episodes must be at least 1"),
        (Eval, ["cartpole", "--checkpoint", "lates"], "no checkpoint 'lates'"),
        (Export, ["cartpole", "-o", "a.h5"], "must end in .onnx or .pt"),
    ],
)
def test_mistake_is_one_line(runs, monkeypatch, command, args, words):
    monkeypatch.chdir(runs)
    before = sorted(os.listdir(runs))
    with pytest.raises(UserError) as caught:
        run(command, *args)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert sorted(os.listdir(runs)) == before


@pytest.mark.slow
def test_export_prints_inputs_and_outputs(runs, tmp_path):
    done = corral_command("export", runs / "cartpole", "-o", tmp_path / "policy.onnx")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    wrote, inputs, outputs, parity = done.stdout.splitlines()
    assert wrote.startswith(f"Wrote {tmp_path}/policy.onnx, ")
    assert inputs == "Inputs: obs float32 [n, 4]"
    assert outputs == "Outputs: action int64 [n]"
    assert re.fullmatch(r"Largest difference from the policy, over 216 random observations: \d\.\de[+-]\d\d", parity)


@pytest.fixture(scope="module")
def game(tmp_path_factory):
    """A run of alphazero, too short to have learned anything."""
    folder = tmp_path_factory.mktemp("runs") / "game"
    settings = {
        "num_simulations": 4,
        "learning_starts": 50,
        "batch_size": 32,
        "hidden_sizes": (16,),
        "eval_episodes": 0,
        "num_envs": 8,
    }
    corral.train("alphazero", env="corral/TicTacToe-v0", steps=200, run_dir=folder, quiet=True, **settings)
    return folder


def test_alphazero_run_is_filmed_and_exported(game, tmp_path, capsys):
    run(Record, game, "-o", tmp_path / "game.mp4")
    moves = int(re.search(r"(\d+) frames", capsys.readouterr().out)[1]) - 1
    assert 5 <= moves <= 9
    run(Export, game, "-o", tmp_path / "policy.onnx")
    assert (tmp_path / "policy.onnx").exists()


def test_eval_of_a_game_by_opponent_and_solved_positions(tmp_path, capsys):
    few = {
        "num_simulations": 2,
        "learning_starts": 32,
        "batch_size": 16,
        "num_envs": 4,
        "eval_episodes": 4,
        "quiet": True,
    }
    for game in ("Connect4", "TicTacToe"):
        easy = {"eval_env_kwargs": {"opponent": "random"}}
        corral.train("alphazero", f"corral/{game}-v0", 64, 1, tmp_path / game, preset="none", **few, **easy)
    capsys.readouterr()
    for opponent in ("random", "perfect"):
        run(Eval, tmp_path / "TicTacToe", "--opponent", opponent, "--episodes", "4", "--deterministic")
        said = capsys.readouterr().out
        won, drawn, lost = map(
            int, re.search(rf"{opponent}, deterministic: (\d) won, (\d) drawn, (\d) lost", said).groups()
        )
        assert won + drawn + lost == 4
        assert opponent == "random" or won == 0
    shares = []
    for sims in ("1", "200"):
        run(Eval, tmp_path / "Connect4", "--opponent", "solved", "--search-sims", sims, "--json")
        shares.append(json.loads(capsys.readouterr().out)["right"])
    assert 0 < shares[0] < shares[1] < 1
    run(Eval, tmp_path / "Connect4", "--opponent", "solved")
    assert re.fullmatch(r"Correct moves: \d\d\.\d% of 1,000 solved positions\n", capsys.readouterr().out)
    with pytest.raises(UserError, match="corral/TicTacToe-v0 has no solved positions"):
        run(Eval, tmp_path / "TicTacToe", "--opponent", "solved")


def test_solved_positions_are_those_of_the_runs_own_game(tmp_path, capsys):
    settings = {"num_simulations": 2, "learning_starts": 32, "batch_size": 16, "num_envs": 4, "eval_episodes": 0}
    env = "helpers.games:SolvedTicTacToe"
    corral.train("alphazero", env, 64, 1, tmp_path / "run", preset="none", quiet=True, **settings)
    capsys.readouterr()
    run(Eval, tmp_path / "run", "--opponent", "solved", "--search-sims", "100", "--json")
    found = json.loads(capsys.readouterr().out)
    assert (found["right"], found["positions"]) == (1.0, 2)  # it sees that it can win at once


def test_env_without_opponents_is_refused(runs):
    with pytest.raises(UserError, match="does not accept the keyword argument 'opponent'"):
        run(Eval, runs / "cartpole", "--opponent", "random", "--episodes", "1")


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_searched_steps_are_not_in_the_video(env, tmp_path):
    corral.train(
        "ppo-search",
        env=env,
        search_mode="eval",
        num_simulations=3,
        steps=1,
        eval_episodes=0,
        run_dir=tmp_path / "x",
        quiet=True,
    )
    loaded = load_policy(tmp_path / "x")
    made = record_policy(
        loaded.experiment, loaded.as_policy(), tmp_path / "x.mp4", seconds=1 if env == "Pendulum-v1" else 60
    )
    if made.returns:
        assert made.frames == made.returns[0] + 1
    else:
        assert made.frames == made.fps


def test_a_policy_without_probabilities_is_not_searched_with(tmp_path):
    corral.train("dqn", env="CartPole-v1", steps=64, eval_episodes=0, run_dir=tmp_path / "x", quiet=True)
    with pytest.raises(UserError, match="QNetwork has neither"):
        run(Eval, tmp_path / "x", "--search-sims", "4", "--episodes", "1")


@pytest.mark.parametrize(
    ("kwargs", "sentence"),
    [({"opponnt": "random"}, "does not accept the keyword argument 'opponnt'"), ({"opponent": "x"}, "player")],
)
def test_wrong_evaluation_env_kwargs_fail_before_training(kwargs, sentence, tmp_path):
    settings = {"run_dir": tmp_path / "x", "eval_env_kwargs": kwargs, "eval_every": 10**9}
    with pytest.raises(UserError, match=sentence):
        corral.train("alphazero", env="corral/TicTacToe-v0", steps=10**9, quiet=True, **settings)
    assert not (tmp_path / "x").exists()


def test_eval_takes_another_environment_of_the_same_spaces(tmp_path, capsys):
    corral.train("ppo", "CartPole-v1", 64, 0, tmp_path / "run", **PPO)
    args = [str(tmp_path / "run"), "--episodes", "2", "--deterministic", "--json", "--env"]
    parse(Eval, [*args, "CartPole-v0"], "corral eval").run()
    found = json.loads(capsys.readouterr().out)["deterministic"]
    expected = corral.evaluate(tmp_path / "run", 2, "CartPole-v0")
    assert tuple(found["returns"]) == expected.returns
    with pytest.raises(UserError, match="observation"):
        parse(Eval, [*args, "MountainCar-v0"], "corral eval").run()
