"""Training on CartPole with other libraries, at given sizes, otherwise with their defaults."""

from __future__ import annotations

import time
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.common.rounds import Slice

ENV = "CartPole-v1"


class Sb3:
    """A Stable-Baselines3 model that learns for a slice in one call, with a given number of torch threads."""

    def __init__(self, algo: str, num_envs: int, threads: int, **settings: Any):
        import stable_baselines3
        from stable_baselines3.common.env_util import make_vec_env

        self._threads = threads
        self._env = make_vec_env(ENV, n_envs=num_envs, seed=0)
        model = getattr(stable_baselines3, algo.upper())
        self._model = model("MlpPolicy", self._env, device="cpu", seed=0, **settings)
        self._rate = 1.0

    def run(self, seconds: float) -> Slice:
        """Learn for the number of steps that the last rate predicts, in whole rollouts."""
        torch.set_num_threads(self._threads)
        before, start = self._model.num_timesteps, time.perf_counter()
        self._model.learn(max(1, round(self._rate * seconds)), reset_num_timesteps=False)
        done = Slice(self._model.num_timesteps - before, time.perf_counter() - start)
        self._rate = done.rate
        return done

    def close(self) -> None:
        self._env.close()


class CleanRl:
    """The loop of CleanRL's `ppo.py` with its published settings, except for the number of environments.

    Adam with learning rate 2.5e-4, gamma 0.99, lambda 0.95, clip 0.2 for ratio and value, entropy 0.01, 128 steps, 4
    epochs of 4 minibatches. Without command line, logging and annealing.
    """

    def __init__(self, num_envs: int):
        self._n, self._steps = num_envs, 128
        make = lambda: gymnasium.wrappers.RecordEpisodeStatistics(gymnasium.make(ENV))  # noqa: E731
        self._envs = gymnasium.vector.SyncVectorEnv([make] * num_envs)
        self._actor, self._critic = _tower(2, 0.01), _tower(1, 1.0)
        params = [*self._actor.parameters(), *self._critic.parameters()]
        self._params, self._optimizer = params, torch.optim.Adam(params, lr=2.5e-4, eps=1e-5)
        self._obs = torch.as_tensor(self._envs.reset(seed=0)[0])
        self._done = torch.zeros(num_envs)

    def run(self, seconds: float) -> Slice:
        torch.set_num_threads(1)
        steps, start = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - start) < seconds or not steps:
            self._update(*self._roll_out())
            steps += self._steps * self._n
        return Slice(steps, elapsed)

    def close(self) -> None:
        self._envs.close()

    def _evaluate(self, obs: Tensor, action: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dist: Any = torch.distributions.Categorical(logits=self._actor(obs))
        action = dist.sample() if action is None else action
        return action, dist.log_prob(action), dist.entropy(), self._critic(obs)

    @torch.no_grad()
    def _roll_out(self) -> tuple[Tensor, ...]:
        shape = (self._steps, self._n)
        obs = torch.zeros((*shape, 4))
        actions, logps, rewards, dones, values, advantages = (torch.zeros(shape) for _ in range(6))
        for t in range(self._steps):
            obs[t], dones[t] = self._obs, self._done
            action, logps[t], _, value = self._evaluate(self._obs)
            values[t], actions[t] = value.flatten(), action
            next_obs, reward, terminated, truncated, _ = self._envs.step(action.numpy())
            rewards[t] = torch.as_tensor(reward)
            self._obs = torch.as_tensor(next_obs)
            self._done = torch.as_tensor(np.logical_or(terminated, truncated), dtype=torch.float32)
        last, next_value, live = torch.zeros(self._n), self._critic(self._obs).flatten(), 1.0 - self._done
        for t in reversed(range(self._steps)):
            delta = rewards[t] + 0.99 * next_value * live - values[t]
            advantages[t] = last = delta + 0.99 * 0.95 * live * last
            next_value, live = values[t], 1.0 - dones[t]
        flat = (actions, logps, advantages, advantages + values, values)
        return obs.reshape(-1, 4), *(part.reshape(-1) for part in flat)

    def _update(
        self, obs: Tensor, actions: Tensor, logps: Tensor, advantages: Tensor, returns: Tensor, values: Tensor
    ) -> None:
        count = len(obs)
        order = np.arange(count)
        for _ in range(4):
            np.random.shuffle(order)
            for rows in np.split(order, 4):
                _, logp, entropy, value = self._evaluate(obs[rows], actions.long()[rows])
                log_ratio = logp - logps[rows]
                ratio = log_ratio.exp()
                with torch.no_grad():
                    ((ratio - 1) - log_ratio).mean()  # its approximate KL
                    ((ratio - 1.0).abs() > 0.2).float().mean().item()  # its clip fraction
                chosen = advantages[rows]
                chosen = (chosen - chosen.mean()) / (chosen.std() + 1e-8)
                policy_loss = torch.max(-chosen * ratio, -chosen * torch.clamp(ratio, 0.8, 1.2)).mean()
                value = value.view(-1)
                near = values[rows] + torch.clamp(value - values[rows], -0.2, 0.2)
                error = torch.max((value - returns[rows]) ** 2, (near - returns[rows]) ** 2)
                loss = policy_loss - 0.01 * entropy.mean() + 0.5 * 0.5 * error.mean()
                self._optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                nn.utils.clip_grad_norm_(self._params, 0.5)
                self._optimizer.step()


def _tower(outputs: int, scale: float) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, size, gain in ((4, 64, 2**0.5), (64, 64, 2**0.5), (64, outputs, scale)):
        layer = nn.Linear(inputs, size)
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
        layers += [layer, nn.Tanh()]
    return nn.Sequential(*layers[:-1])
