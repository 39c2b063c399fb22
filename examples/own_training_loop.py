"""Corral samples, your own torch loop learns: REINFORCE on CartPole with nothing else from Corral."""

import torch

import corral

torch.set_num_threads(1)  # a second thread only slows down a network this small
net = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Tanh(), torch.nn.Linear(64, 2))
optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
dist = lambda obs: torch.distributions.Categorical(logits=net(torch.as_tensor(obs)))  # noqa: E731
sampler = corral.Sampler("CartPole-v1", lambda obs: dist(obs).sample(), num_envs=16)
for update, traj in zip(range(40), sampler.rollouts(steps=128), strict=False):
    returns, running = torch.zeros(traj.shape), torch.zeros(traj.shape[1])
    for t in reversed(range(128)):
        running = returns[t] = torch.as_tensor(traj.reward[t]) + 0.98 * running * torch.as_tensor(~traj.done[t])
    weight = (returns - returns.mean()) / returns.std() * torch.as_tensor(traj.valid)
    loss = -(dist(traj.obs[:-1]).log_prob(torch.as_tensor(traj.action)) * weight).mean()
    optimizer.zero_grad(), loss.backward(), optimizer.step()
    print(f"update {update:3d}  mean return {sampler.episodes.mean_return(50):6.1f}")
sampler.close()
