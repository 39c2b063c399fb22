"""The Atari suite on ALE's vector environment: emulation, preprocessing and threads in C++.

Its results equal those of the suite's wrappers, row by row. Three differences are corrected here: ALE pads a new
episode's frame stack with zeros where the wrappers repeat the first frame; it reports a lost life without starting a
new episode; and rewards are clipped here, so that the unclipped ones stay known.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from corral.core.types import Array, EnvSpec, StepBatch, Tree
from corral.envs.backends.lockstep import LockstepVecEnv
from corral.envs.suites.atari import AtariSuite, import_ale


class AleVecEnv(LockstepVecEnv):
    """VecEnv of one Atari game. Observations are ALE's new arrays, without a copy."""

    def __init__(self, suite: AtariSuite, num_envs: int, threads: int, role: str = "train"):
        import_ale()
        from ale_py.vector_env import AtariVectorEnv

        self._suite = suite
        self._venv = AtariVectorEnv(
            suite.game,
            num_envs,
            num_threads=threads,
            max_num_frames_per_episode=suite.max_frames,
            repeat_action_probability=suite.sticky,
            autoreset_mode=AutoresetMode.SAME_STEP,
            img_height=suite.size,
            img_width=suite.size,
            stack_num=suite.stack,
            frameskip=suite.frame_skip,
            noop_max=suite.noop_max,
            life_loss_info=suite.episodic_life,
            reward_clipping=False,
            use_fire_reset=suite.fire_reset,
        )
        actions: Any = self._venv.single_action_space
        observation = spaces.Box(0, 255, (suite.stack, suite.size, suite.size), np.uint8)
        spec = EnvSpec(observation, spaces.Discrete(int(actions.n)), suite.name)
        super().__init__(spec, num_envs, role)
        self._step_pending = False
        self._age = np.zeros(num_envs, np.int64)  # steps since the episode's first observation
        self._min_age = 0  # the lowest age
        self._lives = self._frame = np.zeros(num_envs, np.int32)

    def _restart(self, seeds: list[int]) -> Tree:
        if self._step_pending:
            self._step_pending = False
            self._venv.recv()
        obs, info = self._venv.reset(seed=np.array(seeds))
        self._lives, self._frame = info["lives"], info["episode_frame_number"]
        if self._infos is not None:
            self._infos.began_rows(self._in_flight.all_envs.ids, info)
        self._age[:] = self._min_age = 0
        self._pad(obs, self._in_flight.all_envs.ids)
        return obs

    def _launch(self, actions: Tree) -> None:
        self._venv.send(actions)
        self._step_pending = True

    def _collect(self) -> tuple[StepBatch, Array]:
        self._step_pending = False
        obs, reward, terminated, truncated, info = self._venv.recv()
        raw_reward = reward.astype(np.float64)
        clipped = raw_reward.clip(-1.0, 1.0) if self._suite.clip_reward else raw_reward.copy()
        batch = self._all_rows(obs, clipped, raw_reward, terminated, truncated)
        self._age += 1
        self._min_age += 1
        lives, frame = info["lives"], info["episode_frame_number"]
        self._pad_new_stacks(obs)
        if batch.first.any():
            # After a game the emulator restarts its frame count and has all lives again.
            life_lost = batch.first & (frame > self._frame) & (lives < self._lives)
            batch.game_over &= ~life_lost
            # ALE returns the final observations after games only.
            batch.final_obs = info["final_obs"]
            batch.final_obs[~batch.game_over] = obs[~batch.game_over]
            self._pad_new_stacks(batch.final_obs)
            self._age[batch.first] = self._min_age = 0
            self._pad(obs, np.flatnonzero(batch.first))
        if self._infos is not None:
            restarted = (
                batch.first & batch.game_over
            )  # ALE's infos are then of the new game; those of the step are lost
            self._infos.stepped_rows(batch.env_ids, info, ~restarted)
            self._infos.stepped_rows(batch.env_ids, {}, restarted)
            self._infos.began_rows(batch.env_ids, info, batch.first)
        self._lives, self._frame = lives, frame
        return batch, self._in_flight.all_envs.ids

    def _pad_new_stacks(self, stacks: Array) -> None:
        if self._min_age < self._suite.stack - 1:
            self._pad(stacks, np.flatnonzero(self._age < self._suite.stack - 1))

    def _pad(self, stacks: Array, rows: Array) -> None:
        """Fill the frames before the episode's start with its first frame."""
        for row, age in zip(rows.tolist(), self._age[rows].tolist(), strict=True):
            first = self._suite.stack - 1 - age
            if first > 0:
                stacks[row, :first] = stacks[row, first]

    def _release(self) -> None:
        self._venv.close()
        del self._venv  # ends ALE's threads
