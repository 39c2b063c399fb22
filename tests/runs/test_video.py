"""Videos as GIF, and MuJoCo's frames without a display."""

import ctypes.util
import os
import sys

import gymnasium
import numpy as np
import pytest

import corral
from corral.core.errors import UserError
from corral.runs.views import video
from corral.runs.views.video import _as_picture, choose_gl, record_run

PPO = {"num_envs": 2, "preset": "none", "quiet": True, "num_steps": 8, "num_minibatches": 1, "eval_episodes": 0}


class Lamp(gymnasium.Env):
    """Episodes of four steps with frames of odd size, whose brightness tells the step."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 80}  # noqa: RUF012 - as Gymnasium writes it

    def __init__(self, render_mode=None):
        self.observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
        self.action_space, self.render_mode, self._t = gymnasium.spaces.Discrete(2), render_mode, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._t = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self._t += 1
        return np.zeros(2, np.float32), 1.0, self._t >= 4, False, {}

    def render(self):
        return np.full((33, 41, 3), 60 * self._t, np.uint8)


def test_a_video_can_be_a_gif_that_repeats(tmp_path):
    image = pytest.importorskip("PIL.Image")
    corral.train("ppo", "tests.runs.test_video:Lamp", 32, 0, tmp_path / "run", **PPO)
    made = record_run(tmp_path / "run", tmp_path / "x.gif", fps=10)
    assert (made.frames, made.fps) == (5, 10)
    with image.open(tmp_path / "x.gif") as gif:
        assert (gif.n_frames, gif.info["loop"], gif.info["duration"]) == (5, 0, 100)
        shades = [gif.seek(k) or int(np.asarray(gif.convert("RGB"))[16, 20, 0]) for k in range(5)]
    assert shades == pytest.approx([0, 60, 120, 180, 240], abs=4)


def test_a_gif_is_never_faster_than_viewers_show(tmp_path):
    image = pytest.importorskip("PIL.Image")
    corral.train("ppo", "tests.runs.test_video:Lamp", 32, 0, tmp_path / "run", **PPO)
    made = record_run(tmp_path / "run", tmp_path / "x.gif", episodes=4)
    assert made.frames == 20
    with image.open(tmp_path / "x.gif") as gif:
        times = [gif.seek(k) or gif.info["duration"] for k in range(gif.n_frames)]
    assert min(times) >= 20
    assert sum(times) == pytest.approx(20 * 1000 / 80, abs=60)


def test_recording_leaves_the_callers_screen_alone(tmp_path, monkeypatch):
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "MUJOCO_GL", "SDL_VIDEODRIVER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(ctypes.util, "find_library", lambda name: name)
    corral.train("ppo", "tests.runs.test_video:Lamp", 32, 0, tmp_path / "run", **PPO)
    before = dict(os.environ)
    corral.record(tmp_path / "run", tmp_path / "x.mp4")
    assert dict(os.environ) == before


def test_other_kinds_of_videos_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"A video must end in \.mp4 or \.gif, got .*x\.avi\."):
        record_run(tmp_path, tmp_path / "x.avi")


@pytest.mark.parametrize("fps", [0, 1e-9, 1e9, float("inf"), float("nan")])
def test_rates_that_ffmpeg_refuses_are_refused(tmp_path, fps):
    with pytest.raises(UserError, match=r"fps must be between 0\.1 and 1000, got"):
        record_run(tmp_path, tmp_path / "x.mp4", fps=fps)


def test_a_video_that_ffmpeg_cannot_write_replaces_nothing(tmp_path, monkeypatch):
    corral.train("ppo", "tests.runs.test_video:Lamp", 32, 0, tmp_path / "run", **PPO)
    monkeypatch.setitem(video._AS_MP4, "codec", "none_of_these")
    (tmp_path / "x.mp4").write_text("mine")
    with pytest.raises(UserError, match=r"x\.mp4 cannot be written: ffmpeg failed"):
        record_run(tmp_path / "run", tmp_path / "x.mp4", fps=10)
    assert (tmp_path / "x.mp4").read_text() == "mine"


class Dark(Lamp):
    def render(self):
        raise NotImplementedError


def test_an_environment_that_cannot_draw_says_so(tmp_path):
    corral.train("ppo", "tests.runs.test_video:Dark", 32, 0, tmp_path / "run", **PPO, backend="local")
    with pytest.raises(UserError, match=r"^Dark cannot be drawn: it has no render\(\); correct that first\.$"):
        record_run(tmp_path / "run", tmp_path / "x.mp4")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere MuJoCo needs no choice")
@pytest.mark.parametrize(
    ("given", "installed", "chosen"),
    [
        ({}, ["EGL", "OSMesa"], "egl"),
        ({}, ["OSMesa"], "osmesa"),
        ({}, [], None),
        ({"DISPLAY": ":0"}, ["EGL"], None),
        ({"MUJOCO_GL": "osmesa"}, ["EGL"], "osmesa"),
    ],
)
def test_mujoco_draws_by_what_is_installed(monkeypatch, given, installed, chosen):
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "MUJOCO_GL"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(ctypes.util, "find_library", lambda name: name if name in installed else None)
    choose_gl()
    assert os.environ.get("MUJOCO_GL") == chosen
    os.environ.pop("MUJOCO_GL", None)


def test_mujoco_that_cannot_draw_says_what_to_install(tmp_path, monkeypatch):
    mujoco_env = pytest.importorskip("gymnasium.envs.mujoco.mujoco_env")

    def fail(self):
        raise RuntimeError("no OpenGL")

    monkeypatch.setattr(mujoco_env.MujocoEnv, "render", fail)
    corral.train("ppo", "InvertedPendulum-v5", 32, 0, tmp_path / "run", **PPO, backend="local")
    with pytest.raises(UserError, match=r"InvertedPendulum-v5 cannot be drawn without a display \(no OpenGL.*apt inst"):
        record_run(tmp_path / "run", tmp_path / "x.mp4", seconds=0.1)


def test_a_missing_library_of_mujoco_gl_is_one_sentence(tmp_path, monkeypatch):
    def resolve(*args):
        exec(compile("raise AttributeError('no glGetError')", "site-packages/OpenGL/GL.py", "exec"))

    corral.train("ppo", "tests.runs.test_video:Lamp", 32, 0, tmp_path / "run", **PPO, backend="local")
    monkeypatch.setattr("corral.runs.views.video.resolve", resolve)
    monkeypatch.setenv("MUJOCO_GL", "osmesa")
    with pytest.raises(
        UserError, match=r"Lamp cannot be drawn .*\(no glGetError; MUJOCO_GL is osmesa\): install EGL or"
    ):
        record_run(tmp_path / "run", tmp_path / "x.mp4")


def test_mujoco_is_filmed_without_a_display(tmp_path, monkeypatch):
    pytest.importorskip("mujoco")
    if ctypes.util.find_library("EGL") is None and ctypes.util.find_library("OSMesa") is None:
        pytest.skip("neither EGL nor OSMesa")
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "MUJOCO_GL"):
        monkeypatch.delenv(name, raising=False)
    corral.train("ppo", "InvertedPendulum-v5", 32, 0, tmp_path / "run", **PPO, backend="local")
    try:
        assert record_run(tmp_path / "run", tmp_path / "x.mp4", seconds=0.1).frames > 0
    finally:
        os.environ.pop("MUJOCO_GL", None)


@pytest.mark.parametrize("value", [0.25, 0.5])
def test_small_frames_of_floats_are_enlarged_and_scaled(value):
    picture = _as_picture(np.full((10, 12, 3), value), "X")
    assert (picture.shape, picture.dtype, int(picture[0, 0, 0])) == ((210, 252, 3), np.uint8, round(255 * value))
    with pytest.raises(UserError, match=r"X cannot be recorded: .* got shape \(10, 12, 3\) of float64"):
        _as_picture(np.full((10, 12, 3), 2.0), "X")


def test_pygame_without_a_screen_is_not_told_dummy(tmp_path, monkeypatch):
    monkeypatch.delenv("SDL_VIDEODRIVER", raising=False)
    corral.train("ppo", "tests.runs.test_video:Lamp", 32, 0, tmp_path / "run", **PPO)
    seen = []
    monkeypatch.setattr(video, "choose_gl", lambda: seen.append(os.environ["SDL_VIDEODRIVER"]))
    record_run(tmp_path / "run", tmp_path / "x.gif")
    assert seen == ["dummy,offscreen"], "highway-env draws nothing if it is dummy"
    pygame = pytest.importorskip("pygame")
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy,offscreen")
    pygame.display.init()
    assert pygame.display.get_driver() in ("dummy", "offscreen")
    pygame.display.quit()
