"""V-trace and forward passes as their definitions say them: row by row, without a recurrence over targets."""

import copy

import numpy as np
import torch

from corral.core.types import tree_map
from helpers.batches import batch_for, randomize


def stale(algo, model, seed=0, **kwargs):
    """Experience of a policy that has changed since, which began with something in its memory, if it has one."""
    traj = batch_for(algo, model, seed, **kwargs)
    if model.recurrent:
        rng = np.random.default_rng(seed)
        traj.first[0, ::2] = False
        traj.extras["state"][0] = rng.normal(size=traj.extras["state"][0].shape)
    moved = randomize(copy.deepcopy(model), seed=5, scale=0.1)
    with torch.no_grad():
        for param, by in zip(model.parameters(), moved.parameters(), strict=True):
            param.add_(by)
    return traj


def rows_one_by_one(model, traj):
    """Parameters `[T, B, P]` and values `[T, B]` with their graph, and values of the true successors."""
    ends = {(int(t), int(b)): k for k, (t, b) in enumerate(traj.final_at)}
    params, values, after = [], [], np.zeros(traj.shape)

    def see(obs, state, first):
        obs = tree_map(lambda leaf: torch.from_numpy(np.asarray(leaf)[None]), obs)
        if not model.recurrent:
            return *model(obs), state
        obs = tree_map(lambda leaf: leaf[None], obs)
        of_actions, value, states = model.unroll(obs, state, torch.tensor([[bool(first)]]))
        return of_actions[0], value[0], states[0]

    def successor(t, b):
        end = ends.get((t, b))
        return (
            tree_map(lambda leaf: leaf[t + 1, b], traj.obs)
            if end is None
            else tree_map(lambda leaf: leaf[end], traj.final_obs)
        )

    for b in range(traj.shape[1]):
        state = torch.from_numpy(traj.extras["state"][0, b : b + 1]) if model.recurrent else None
        column = []
        for t in range(traj.shape[0]):
            *seen, state = see(tree_map(lambda leaf, t=t, b=b: leaf[t, b], traj.obs), state, traj.first[t, b])
            column.append(seen)
            after[t, b] = see(successor(t, b), state, False)[1].item()
        params.append(torch.cat([of_actions for of_actions, _ in column]))
        values.append(torch.cat([value for _, value in column]))
    return torch.stack(params, 1), torch.stack(values, 1), after


def literal_vtrace(traj, ratio, value, after, gamma, rho_bar, c_bar):
    """v_s = V_s + sum_t gamma^(t-s) (prod_(i<t) min(c_bar, ratio_i)) min(rho_bar, ratio_t) delta_t, and
    r_s + gamma v_(s+1) - V_s."""

    def last(s, b):
        """The last row of the stretch that begins at `s`."""
        t = s
        while t + 1 < traj.shape[0] and not traj.done[t, b] and not traj.faulty[t + 1, b]:
            t += 1
        return t

    def bootstrap(t, b, v):
        return 0.0 if traj.terminated[t, b] else v

    targets, gains = np.array(value, np.float64), np.zeros(traj.shape)
    for s, b in np.ndindex(*traj.shape):
        if traj.faulty[s, b]:
            continue
        for t in range(s, last(s, b) + 1):
            product = np.prod([min(c_bar, ratio[i, b]) for i in range(s, t)])
            delta = traj.reward[t, b] + gamma * bootstrap(t, b, after[t, b]) - value[t, b]
            targets[s, b] += gamma ** (t - s) * product * min(rho_bar, ratio[t, b]) * delta
    for s, b in np.ndindex(*traj.shape):
        if not traj.faulty[s, b]:
            following = targets[s + 1, b] if last(s, b) > s else after[s, b]
            gains[s, b] = traj.reward[s, b] + gamma * bootstrap(s, b, following) - value[s, b]
    return targets, gains
