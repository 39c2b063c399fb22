"""Models, rows and literal distributions for tests of losses."""

import numpy as np
import torch

from corral.algos import a2c, ppo, reinforce
from corral.data.episodes import EpisodeStore
from corral.nets.config import NetConfig
from helpers.batches import SPECS, act_on, experience, randomize

ON_POLICY = {
    "ppo": (ppo.Ppo, ppo.Config),
    "a2c": (a2c.A2c, a2c.Config),
    "reinforce": (reinforce.Reinforce, reinforce.Config),
}


PATHS = ["torch", "numpy"]


LSTM = NetConfig(hidden_sizes=(8,), rnn="lstm", rnn_size=6)


GRU = NetConfig(hidden_sizes=(8,), rnn="gru", rnn_size=6)


def make(name, space="discrete", **settings):
    kind, config = ON_POLICY[name]
    algo = kind(config(**settings), SPECS[space], 4)
    return algo, randomize(algo.build_model(), scale=0.3)


def cases(names=ON_POLICY, spaces_=SPECS, cores=(None,)):
    found = [(n, s, None) for n in names for s in spaces_]
    return found + [(n, "hybrid", core) for n in names if n != "reinforce" for core in cores if core]


def number(loss):
    return float(torch.as_tensor(loss).detach())


def numpy_of(tensor):
    return tensor.detach().double().numpy()


def literal_distribution(model, params, action):
    """Log-probabilities and entropies by torch's own distributions."""
    sizes, at = model.actions.sizes, 0
    logp = entropy = torch.zeros(params.shape[:-1])
    for k, size in enumerate(sizes):
        part = torch.distributions.Categorical(logits=params[..., at : at + size])
        logp, entropy = logp + part.log_prob(action[..., k]), entropy + part.entropy()
        at += size
    if model.actions.num_numbers:
        mean, log_std = params[..., at:].chunk(2, -1)
        part = torch.distributions.Normal(mean, log_std.exp())
        logp = logp + part.log_prob(action[..., len(sizes) :]).sum(-1)
        entropy = entropy + part.entropy().sum(-1)
    return logp, entropy


def forward(model, rows):
    if rows.state is None:
        params, value = model(rows.obs)
    else:
        params, value, _ = model.unroll(rows.obs, rows.state, rows.first)
    return *literal_distribution(model, params, rows.action), value


def episodes_for(algo, model, count=6, seed=0):
    """Whole episodes from the store, padded as it does it, and the fragments they came from."""
    store = EpisodeStore(algo.spec, algo.data, 4)
    policy = algo.make_policy(model, explore=True, rng=np.random.default_rng(seed))
    traj = act_on(experience(algo.spec, 60, 4, seed, end=0.12, fault=0.05), policy, algo.spec)
    store.put(traj)
    return store.get().batch
