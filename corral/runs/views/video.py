"""Render a policy on the screen or record a video; `corral.record` records the policy of a run."""

from __future__ import annotations

import contextlib
import ctypes.util
import math
import os
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from corral.acting.policy import Policy, bind_envs
from corral.config.experiment import Experiment
from corral.core.errors import UserError, describe_error
from corral.core.gym_env import PassiveWrapper
from corral.core.types import Array, EnvSpec
from corral.envs.make import make_vec
from corral.envs.resolve import EnvLike, resolve
from corral.envs.suites.atari import AtariSuite
from corral.envs.suites.pixels import NO_SCREEN, PixelSuite
from corral.envs.vec_env import VecEnv
from corral.runs.evaluation.evaluate import acting_seed, with_env
from corral.runs.folder import atomic_path, require_same_env
from corral.runs.load import load_policy

_CONSOLE_FPS = 60.0  # of an Atari, regardless of its metadata
_FPS = 30.0  # default
_MIN_FPS, _MAX_FPS = 0.1, 1000.0
_TINY, _ENLARGED = 32, 256  # longer side of frames in pixels: MinAtar's frames have 10 x 10
_EXTRA = "pip install 'corral-rl[video]'"


@dataclass(frozen=True)
class Recording:
    """A recorded video."""

    path: Path
    frames: int
    fps: float
    returns: tuple[float, ...]  # of complete episodes

    @property
    def seconds(self) -> float:
        return self.frames / self.fps


def record(run: str | Path, path: str | Path, **options: Any) -> Path:
    """Record the policy of a run as MP4 or GIF; `options` are those of `record_run`."""
    return record_run(run, path, **options).path


def record_run(  # noqa: PLR0913 - the options of the command
    run: str | Path,
    path: str | Path,
    *,
    env: EnvLike | None = None,
    episodes: int = 1,
    seconds: float = 120.0,
    fps: float | None = None,
    deterministic: bool = True,
    seed: int | None = None,
    checkpoint: str = "best",
) -> Recording:
    """Record the policy of a run.

    Args:
        run: the run's folder.
        path: the file to write, by its name an MP4 or a GIF.
        env: an environment other than the run's, with the same spaces.
        episodes: number of episodes.
        seconds: maximum length of the video.
        fps: frames per second; default: the environment's.
        deterministic: take the best actions instead of sampling.
        seed: of the episodes; default: the run's, whose evaluation plays the same first episode.
        checkpoint: `best`, `latest`, or a name.
    """
    path = Path(path)
    if path.suffix.lower() not in (".mp4", ".gif"):
        raise UserError(f"A video must end in .mp4 or .gif, got {path}.")
    for name, value in (("episodes", episodes), ("seconds", seconds)):
        if not value > 0:
            raise UserError(f"{name} must be above 0, got {value:g}.")
    if fps is not None and not _MIN_FPS <= fps <= _MAX_FPS:
        raise UserError(f"fps must be between {_MIN_FPS:g} and {_MAX_FPS:g}, got {fps:g}.")
    if seed is not None and seed < 0:
        raise UserError(f"seed must be at least 0, got {seed}.")
    loaded = load_policy(run, checkpoint, device="run")
    if env is not None:
        loaded.experiment = with_env(loaded.experiment, env)
    seed = loaded.experiment.seed if seed is None else seed
    policy = loaded.as_policy(deterministic=deterministic, seed=acting_seed(seed, deterministic=deterministic))
    return record_policy(
        loaded.experiment, policy, path, episodes=episodes, seconds=seconds, fps=fps, seed=seed, spec=loaded.spec
    )


def record_policy(
    experiment: Experiment,
    policy: Policy,
    path: str | Path,
    *,
    episodes: int = 1,
    seconds: float = 120.0,
    fps: float | None = None,
    seed: int = 0,
    spec: EnvSpec | None = None,
) -> Recording:
    """Record the policy as GIF or H.264 in an MP4, atomically: a frame at the start of an episode and one per step."""
    recording = _RecordedFactory(experiment)
    with _without_screen(), make_vec(recording, 1, "local", role="eval") as vec:
        if spec is not None:
            require_same_env(vec.spec, spec)
        recording.enabled = False  # do not record environments that a planner builds for itself
        bind_envs(policy, vec)
        recording.enabled = True
        vec.reset(seed)
        batch = vec.recv()
        rate = fps or recording.fps
        state, count, running, returns = policy.initial_state(1), 0, 0.0, list[float]()
        with _writer(Path(path), rate) as write:
            while len(returns) < episodes and count < seconds * rate:
                action, state, _ = policy.act(batch.obs, state, batch.first)
                vec.send(batch.env_ids, action)
                batch = vec.recv()
                running += float(batch.raw_reward[0])
                for frame in recording.frames:
                    write(frame)
                count += len(recording.frames)
                recording.frames.clear()
                if batch.game_over[0] and not batch.faulty[0]:
                    returns.append(running)
                running = 0.0 if batch.game_over[0] or batch.faulty[0] else running
    return Recording(Path(path), count, rate, tuple(returns))


@contextlib.contextmanager
def _without_screen() -> Iterator[None]:
    """Let pygame and MuJoCo draw without a screen; what they are told is not left behind for the caller's own."""
    names = ("SDL_VIDEODRIVER", "MUJOCO_GL")
    before = {name: os.environ.get(name) for name in names}
    os.environ.setdefault("SDL_VIDEODRIVER", NO_SCREEN)  # pygame would look for a screen
    choose_gl()
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)


def choose_gl() -> None:
    """Without a display and MUJOCO_GL, let MuJoCo draw by EGL, or by OSMesa, if one of them is installed."""
    if _has_display() or "MUJOCO_GL" in os.environ:
        return
    for backend, library in (("egl", "EGL"), ("osmesa", "OSMesa")):
        if ctypes.util.find_library(library) is not None:
            os.environ["MUJOCO_GL"] = backend
            return


def _has_display() -> bool:
    return sys.platform != "linux" or bool({"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys())


def make_screen(experiment: Experiment) -> VecEnv:
    """One environment that renders on the screen; UserError without one."""
    if not _has_display() and "SDL_VIDEODRIVER" not in os.environ:
        raise UserError("There is no display: use `corral record` instead.")
    return make_vec(_Screen(experiment), 1, "local", role="eval")


_RECORDINGS: weakref.WeakKeyDictionary[gymnasium.Env[Any, Any], _RecordedFactory] = weakref.WeakKeyDictionary()


class _Screen:
    """Builds environments that render on the screen."""

    def __init__(self, experiment: Experiment):
        self._experiment, self.name = experiment, experiment.env

    def __call__(self) -> gymnasium.Env[Any, Any]:
        return _build(self._experiment, "human")


class _RecordedFactory:
    """Builds environments that put a frame of every step into `frames`, if built while `enabled`."""

    def __init__(self, experiment: Experiment):
        self._experiment, self.name = experiment, experiment.env
        self.frames: list[Array] = []
        self.first: list[Array] = []  # first frame of an episode before its first step
        self.fps, self.enabled = _FPS, True

    def __call__(self) -> gymnasium.Env[Any, Any]:
        env = _build(self._experiment, "rgb_array")
        suite = self._experiment.environment()[0]
        if isinstance(suite, AtariSuite):
            self.fps = _CONSOLE_FPS / suite.frame_skip
        else:
            self.fps = float(env.metadata.get("render_fps") or _FPS)
        camera = _FrameRecorder(env)
        if self.enabled:
            _RECORDINGS[camera] = self
        return camera


class _FrameRecorder(PassiveWrapper):
    """Records every step, and the first frame of an episode once it is played; frames are not copied with it."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        result = self.env.reset(seed=seed, options=options)
        recording = _RECORDINGS.get(self)
        if recording is not None:
            recording.first = [self._render_frame()]
        return result

    def step(self, action: Any) -> Any:
        result, recording = self.env.step(action), _RECORDINGS.get(self)
        if recording is not None:
            recording.frames += [*recording.first, self._render_frame()]
            recording.first = []
        return result

    def _render_frame(self) -> Array:
        try:
            frame = self.env.render()
        except gymnasium.error.DependencyNotInstalled as error:
            raise UserError(f"{_name(self)} needs a package to render: {_EXTRA} ({error}).") from error
        except Exception as error:
            if _draws_with_mujoco(self):
                raise _no_gl(_name(self), error) from error
            why = "it has no render()" if isinstance(error, NotImplementedError) else describe_error(error)
            raise UserError(f"{_name(self)} cannot be drawn: {why}; correct that first.") from error
        return _as_picture(frame, _name(self))


def _as_picture(frame: Any, name: str) -> Array:
    """A copy of what `render()` returned, as bytes: floats from 0 to 1 are scaled, and tiny frames enlarged."""
    array: Array = frame if isinstance(frame, np.ndarray) else np.zeros(0)
    if array.ndim == 3 and array.dtype.kind == "f" and array.size and array.min() >= 0 and array.max() <= 1:
        array = np.round(255 * array).astype(np.uint8)
    if array.ndim != 3 or array.shape[2] != 3 or array.dtype != np.uint8:
        got = f"shape {frame.shape} of {frame.dtype}" if isinstance(frame, np.ndarray) else type(frame).__name__
        raise UserError(
            f"{name} cannot be recorded: with render_mode='rgb_array', render() must return uint8 "
            f"[height, width, 3], got {got}."
        )
    side = max(array.shape[:2])
    times = _ENLARGED // side if 0 < side <= _TINY else 1
    return np.array(array.repeat(times, axis=0).repeat(times, axis=1))


def _draws_with_mujoco(env: gymnasium.Env[Any, Any]) -> bool:
    return "mujoco" in sys.modules and any("mujoco" in kind.__module__ for kind in type(env.unwrapped).__mro__)


def _no_gl(name: str, error: Exception) -> UserError:
    return UserError(
        f"{name} cannot be drawn without a display ({str(error).strip()}; MUJOCO_GL is "
        f"{os.environ.get('MUJOCO_GL', 'not set')}): install EGL or OSMesa (apt install libegl1 libosmesa6), or set "
        "MUJOCO_GL to egl or osmesa."
    )


def _build(experiment: Experiment, render_mode: str) -> gymnasium.Env[Any, Any]:
    env, kwargs = experiment.environment()
    if isinstance(env, PixelSuite):  # its observations are its frames
        drawn = env()
        return gymnasium.wrappers.HumanRendering(drawn) if render_mode == "human" else drawn
    try:
        return resolve(env, {**kwargs, "render_mode": render_mode}).factory()
    except (AttributeError, ImportError) as error:  # MuJoCo loads what MUJOCO_GL names when it is imported
        if not any("OpenGL" in frame.filename for frame in traceback.extract_tb(error.__traceback__)):
            raise
        raise _no_gl(experiment.env, error) from error
    except TypeError as error:
        if not any(text in str(error) for text in ("render_mode", "takes no arguments")):
            raise
        raise UserError(f"{experiment.env} takes no render_mode: add it to __init__ and implement render().") from error


@contextlib.contextmanager
def _writer(path: Path, fps: float) -> Iterator[Callable[[Array], None]]:
    """Yields a function that takes frames of one size; the video is written on success."""
    try:
        import imageio_ffmpeg
    except ImportError as error:
        raise UserError(f"Videos need imageio-ffmpeg: {_EXTRA}.") from error
    encoder: Any = None
    shape: tuple[int, ...] = ()

    def write(frame: Array) -> None:
        nonlocal encoder, shape
        if encoder is None:
            shape = frame.shape
            height, width = (size + size % 2 for size in shape[:2])  # H.264 with subsampled colours needs even sizes
            options = _as_gif(fps) if path.suffix.lower() == ".gif" else _AS_MP4
            encoder = imageio_ffmpeg.write_frames(
                str(unfinished), (width, height), fps=fps, macro_block_size=1, ffmpeg_log_level="error", **options
            )
            encoder.send(None)
        if frame.shape != shape:
            raise UserError(f"All frames of a video must have the same size, got {shape} and then {frame.shape}.")
        padding = [(0, size % 2) for size in shape[:2]]
        encoder.send(np.ascontiguousarray(np.pad(frame, [*padding, (0, 0)], mode="edge")))

    with atomic_path(path) as unfinished:
        try:
            yield write
        finally:
            if encoder is not None:
                encoder.close()
        if encoder is not None and not unfinished.stat().st_size:
            raise UserError(f"{path} cannot be written: ffmpeg failed, as it says above.")


_AS_MP4 = {"codec": "libx264", "quality": 8, "output_params": ["-f", "mp4", "-movflags", "+faststart"]}
_MAX_GIF_FPS = 50  # viewers show faster ones at 10 frames per second


def _as_gif(fps: float) -> dict[str, Any]:
    """Options of an animation that repeats, with a palette made for its frames."""
    rate = fps / math.ceil(fps / _MAX_GIF_FPS)
    palette = f"fps={rate:g},split[a][b];[a]palettegen[p];[b][p]paletteuse=dither=none"
    output = ["-filter_complex", palette, "-loop", "0", "-f", "gif"]
    return {"codec": "gif", "quality": None, "pix_fmt_out": "pal8", "output_params": output}


def _name(env: gymnasium.Env[Any, Any]) -> str:
    return env.spec.id if env.spec is not None else type(env.unwrapped).__name__
