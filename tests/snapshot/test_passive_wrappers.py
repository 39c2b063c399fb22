"""What shows or records an environment sees what was done, and nothing of what was only thought of."""

import sys
import types

import gymnasium
import numpy as np
import pytest
from gymnasium.wrappers import RecordVideo, RenderCollection

import corral


class Drawn(gymnasium.Env):
    """Counts how often any of its kind was drawn."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}  # noqa: RUF012 - gymnasium's own convention
    render_mode = "rgb_array"
    drawn = 0

    def __init__(self):
        self.observation_space = gymnasium.spaces.Box(-1e9, 1e9, (1,), np.float64)
        self.action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.x = 0.0
        return np.array([self.x]), {}

    def step(self, action):
        self.x += float(action)
        return np.array([self.x]), self.x, self.x >= 3, False, {}

    def render(self):
        Drawn.drawn += 1
        return np.full((64, 64, 3), int(self.x), np.uint8)


def record(folder):
    return RecordVideo(Drawn(), str(folder), episode_trigger=lambda episode: True, disable_logger=True)


@pytest.fixture
def videos(monkeypatch):
    """Frames of what RecordVideo writes."""
    found = []
    monkeypatch.setitem(sys.modules, "moviepy", types.ModuleType("moviepy"))

    def stop(self):
        found.append([int(frame[0, 0, 0]) for frame in self.recorded_frames])
        self.recorded_frames, self.recording = [], False

    monkeypatch.setattr(RecordVideo, "stop_recording", stop)
    return found


@pytest.mark.parametrize("given", ["instance", "factory"])
def test_video_has_only_real_steps(tmp_path, videos, given):
    env = record(tmp_path)
    env.reset(seed=0)
    snapshots = corral.Snapshots(env if given == "instance" else lambda: record(tmp_path))
    env, before = snapshots.env, Drawn.drawn
    for action in (1, 0, 1):
        here = snapshots.save()
        steps = snapshots.expand([here, here], [0, 1])
        assert steps.reward.tolist() == [env.unwrapped.x, env.unwrapped.x + 1]
        env.step(action)
    assert Drawn.drawn == before + 3
    assert snapshots.states.nbytes / len(snapshots.states) < 3000  # no frames
    snapshots.load(here)
    assert env.step(1)[1] == 2.0
    snapshots.close()
    env.close()
    assert videos == [[0, 1, 1, 2, 2]]


def test_collected_frames_are_of_real_steps():
    env = RenderCollection(Drawn())
    env.reset(seed=0)
    search = corral.Search(env, sims=8, rollout_steps=5)
    before = Drawn.drawn
    env.step(1)
    search()
    env.step(1)
    assert Drawn.drawn == before + 2
    assert [int(frame[0, 0, 0]) for frame in env.render()] == [0, 1, 2]
    search.close()
