"""Losses against literal NumPy, and what must not change them."""

import copy
import warnings

import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers.batches import SPECS, batch_for, experience, learned, on_path, randomize
from helpers.literal_losses import (
    GRU,
    LSTM,
    ON_POLICY,
    PATHS,
    cases,
    episodes_for,
    literal_distribution,
    make,
    number,
    numpy_of,
)

from corral.algos import a2c, dqn, ppo, reinforce
from corral.algos.trajectories import compute_values, evaluate_actions
from corral.core.errors import UserError
from corral.core.types import EnvSpec, Sample, Transitions, slice_envs, tree_map
from corral.learn.device import Precision
from corral.learn.learner import Learner

# -- values and advantages -----------------------------------------------------------------------------------------


def test_values_are_of_observations_and_true_successors():
    algo, model = make("ppo")
    traj = batch_for(algo, model)
    assert len(traj.final_at) > 3
    value, after = compute_values(model, traj)
    for t, b in np.ndindex(*traj.shape):
        row = {"now": traj.obs[t, b], "then": traj.next_obs()[t, b]}
        seen = {key: float(model(torch.from_numpy(obs[None]))[1].detach()) for key, obs in row.items()}
        assert value[t, b] == pytest.approx(seen["now"], abs=1e-5)
        assert after[t, b] == pytest.approx(seen["then"], abs=1e-5)


@pytest.mark.parametrize("net", [LSTM, GRU])
def test_recurrent_state_continues_into_final_observation(net):
    algo, model = make("ppo", net=net)
    traj = batch_for(algo, model, end=0.2)
    value, after = compute_values(model, traj)
    ends = {(int(t), int(b)): k for k, (t, b) in enumerate(traj.final_at)}
    assert len(ends) > 3
    for b in range(traj.shape[1]):
        state = torch.zeros(1, model.core.state_size)
        for t in range(traj.shape[0]):
            first = torch.from_numpy(traj.first[t, b : b + 1])

            def see(obs, state, first):
                _, seen, states = model.unroll(torch.from_numpy(obs)[None, None], state, first[None])
                return float(seen.detach()), states[0].detach()

            seen, state = see(traj.obs[t, b], state, first)
            assert value[t, b] == pytest.approx(seen, abs=1e-5)
            end = ends.get((t, b))
            following = traj.obs[t + 1, b] if end is None else traj.final_obs[end]
            assert after[t, b] == pytest.approx(see(following, state, torch.zeros(1, dtype=torch.bool))[0], abs=1e-5)


@pytest.mark.parametrize("name", ["ppo", "a2c"])
@pytest.mark.parametrize("lam", [0.0, 0.7, 1.0])
def test_advantage_sum_stops_at_episode_end(name, lam):
    algo, model = make(name, gamma=0.9, gae_lambda=lam)
    traj = batch_for(algo, model, end=0.2)
    assert traj.terminated.any()
    assert (traj.truncated & ~traj.terminated).any()
    value, after = compute_values(model, traj)
    rows = algo.prepare(model, traj)
    advantage = numpy_of(rows.advantages).reshape(traj.shape)
    for t, b in np.ndindex(*traj.shape):
        total, weight = 0.0, 1.0
        for k in range(t, traj.shape[0]):
            bootstrap = 0.0 if traj.terminated[k, b] else after[k, b]
            total += weight * (traj.reward[k, b] + 0.9 * bootstrap - value[k, b])
            weight *= 0.9 * lam
            if traj.done[k, b]:
                break
        assert advantage[t, b] == pytest.approx(total, abs=1e-4)
    np.testing.assert_allclose(rows.returns, rows.advantages + rows.old_values, rtol=1e-6)
    np.testing.assert_allclose(numpy_of(rows.old_values).reshape(traj.shape), value)


def test_lam_1_is_the_n_step_advantage_and_lam_0_is_td():
    _, model = make("a2c")
    for lam, steps in ((1.0, 12), (0.0, 1)):
        algo = a2c.A2c(a2c.Config(gamma=0.5, gae_lambda=lam, num_steps=12), SPECS["discrete"], 4)
        traj = batch_for(algo, model, end=0.0)
        value, after = compute_values(model, traj)
        target = numpy_of(algo.prepare(model, traj).returns).reshape(traj.shape)
        last = min(steps, 12) - 1
        expected = sum(0.5**k * traj.reward[k] for k in range(last + 1)) + 0.5 ** (last + 1) * after[last]
        np.testing.assert_allclose(target[0], expected, rtol=1e-4)
        assert not np.allclose(value[0], expected)


# -- the ratio -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "space", "net"), cases(["ppo"], cores=(LSTM, GRU)))
@pytest.mark.parametrize("path", PATHS)
def test_the_ratio_is_1_for_the_policy_that_acted(name, space, net, path):
    algo, model = make(name, space, **({"net": net} if net else {}))
    on_path(model, path)
    if model.log_std is not None:
        with torch.no_grad():
            model.log_std.fill_(1.0)
    traj = batch_for(algo, model, length=40)
    if model.actions.num_numbers:
        numbers = traj.extras["action"][..., model.actions.num_choices :]
        assert (np.abs(numbers) > 1).mean() > 0.3  # out of bounds
        leaves = traj.action if space == "box" else traj.action["b"]
        box = SPECS[space].action_space if space == "box" else SPECS[space].action_space["b"]
        assert leaves.min() == box.low.min()
        assert leaves.max() == box.high.max()
    rows = algo.prepare(model, traj)
    for part in [rows, *algo.minibatches(rows, torch.Generator().manual_seed(0))]:
        ratio = (log_prob(model, part) - part.old_log_prob).exp()
        assert number((ratio - 1).abs().max()) < 1e-5


def log_prob(model, rows):
    """By the path that the model learns on."""
    if model.numpy_towers is None:
        return evaluate_actions(model, rows)[0]
    params = model.numpy_params(rows.obs.numpy())
    return torch.from_numpy(model.actions.evaluate_numpy(params, rows.action.numpy())[0])


@pytest.mark.parametrize(("name", "space", "net"), cases(["ppo"], cores=(LSTM,)))
def test_ratio_is_against_behaviour_policy(name, space, net):
    algo, model = make(name, space, **({"net": net} if net else {}))
    traj = batch_for(algo, model)
    recorded = traj.extras["logp"].copy()
    randomize(model, seed=5, scale=0.3)  # somebody has updated the weights since
    rows = algo.prepare(model, traj)
    np.testing.assert_array_equal(rows.old_log_prob.reshape(-1), recorded.reshape(-1))
    now = literal_distribution(model, *_params(model, rows))[0].detach()
    ratio = (evaluate_actions(model, rows)[0] - rows.old_log_prob).exp().detach().numpy()
    np.testing.assert_allclose(ratio, np.exp(now.numpy() - recorded.reshape(now.shape)), rtol=1e-4)
    assert np.abs(ratio - 1).max() > 0.1


def _params(model, rows):
    params = model(rows.obs)[0] if rows.state is None else model.unroll(rows.obs, rows.state, rows.first)[0]
    return params, rows.action


# -- faults --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "space", "net"), cases(["ppo", "a2c"], cores=(LSTM, GRU)))
@pytest.mark.parametrize("path", PATHS)
def test_nothing_of_a_faulty_row_reaches_a_loss(name, space, net, path):
    algo, model = make(name, space, **({"net": net} if net else {}))
    traj = batch_for(algo, model, fault=0.15)
    other = copy.deepcopy(traj)
    rng = np.random.default_rng(1)
    bad = other.faulty
    assert bad.sum() > 3
    other.reward[bad] = rng.normal(size=bad.sum()) * 100
    other.extras["logp"][bad] += rng.normal(size=bad.sum())
    other.extras["action"][bad] = 0
    at = other.faulty[other.final_at[:, 0], other.final_at[:, 1]]
    other.final_obs[at] = rng.normal(size=other.final_obs[at].shape) * 10
    before = np.zeros_like(bad)  # the observation of a faulty row is the successor of the row before, if there is one
    before[1:] = ~traj.done[:-1] & ~bad[:-1]
    apart = bad & ~before
    other.obs[:-1][apart] += 1 if net is None else 0
    results = []
    on_path(model, path)
    for batch in (traj, other):
        output, found = learned(algo, model, algo.prepare(model, batch), path)
        results.append((number(output.loss), found))
    assert results[0][0] == results[1][0]
    for a, b in zip(results[0][1], results[1][1], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("path", PATHS)
def test_padding_of_episodes_reaches_no_loss(path):
    algo, model = make("reinforce", episodes_per_update=6)
    on_path(model, path)
    batch = episodes_for(algo, model)
    other = copy.deepcopy(batch)
    pad = other.faulty
    other.reward[pad] = 7
    other.extras["logp"][pad] = -3
    other.extras["action"][pad] = 0
    other.obs[:-1][pad] += 5
    results = [learned(algo, model, algo.prepare(model, b), path) for b in (batch, other)]
    assert number(results[0][0].loss) == number(results[1][0].loss)
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))


@pytest.mark.parametrize("name", ["ppo", "a2c"])
@pytest.mark.parametrize("net", [None, LSTM])
def test_a_batch_of_nothing_but_faults_changes_nothing(name, net):
    algo, model = make(name, **({"net": net} if net else {}))
    said = []
    learner = Learner(algo, model, torch.Generator(), Precision("fp32", ""), report=said.append)
    traj = batch_for(algo, model, length=1, width=2, end=0.0)
    traj.faulty[:] = traj.truncated[:] = True
    before = learner.flat.weights.detach().clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        learner.step(Sample(traj), 0.0)
    assert torch.equal(learner.flat.weights, before)
    assert said == []


# -- what cannot be -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        (ppo.Config, {"learning_rate": 0.0}),
        (ppo.Config, {"learning_rate": float("nan")}),
        (ppo.Config, {"gamma": 1.5}),
        (ppo.Config, {"gae_lambda": -0.1}),
        (ppo.Config, {"update_epochs": 0}),
        (ppo.Config, {"clip_coef": -0.1}),
        (ppo.Config, {"clip_range_vf": -0.5}),
        (ppo.Config, {"clip_range_vf": 0.0}),
        (ppo.Config, {"target_kl": -1.0}),
        (a2c.Config, {"num_steps": 0}),
        (a2c.Config, {"max_grad_norm": 0.0}),
        (reinforce.Config, {"episodes_per_update": 0}),
        (reinforce.Config, {"net": LSTM}),
        (dqn.Config, {"tau": 0.0}),
        (dqn.Config, {"exploration_final_eps": 1.5}),
        (dqn.Config, {"net": GRU}),
    ],
)
def test_invalid_settings_are_refused(config, settings):
    with pytest.raises(UserError) as caught:
        config(**settings)
    assert "\n" not in str(caught.value)


def test_dqn_refuses_continuous_actions():
    for space in ("box", "hybrid"):
        with pytest.raises(UserError, match="use ppo or a2c"):
            dqn.Dqn(dqn.Config(), SPECS[space], 1)


def test_on_policy_slices_of_a_batch_give_the_same_rows():
    algo, model = make("a2c")
    traj = batch_for(algo, model)
    whole = algo.prepare(model, traj)
    columns = np.array([2, 0])
    part = algo.prepare(model, slice_envs(traj, columns))
    target = whole.returns.reshape(traj.shape)[:, columns].reshape(-1)
    torch.testing.assert_close(part.returns, target, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("path", PATHS)
def test_trees_of_observations_go_through_every_loss(path):
    space = spaces.Dict({"a": spaces.Box(-9, 9, (2,), np.float32), "b": spaces.Box(-9, 9, (), np.float64)})
    spec = EnvSpec(space, spaces.Discrete(3))
    for kind, config in ON_POLICY.values():
        algo = kind(config(), spec, 4)
        model = algo.build_model()
        rows = algo.prepare(model, batch_for(algo, model))
        assert np.isfinite(number(learned(algo, model, rows, path)[0].loss))
    algo = dqn.Dqn(dqn.Config(batch_size=8, learning_starts=8), spec, 4)
    traj = experience(spec)
    flat = tree_map(lambda leaf: leaf[:-1, 0], traj.obs)
    after = tree_map(lambda leaf: leaf[1:, 0], traj.obs)
    batch = Transitions(flat, traj.action[:, 0], traj.reward[:, 0], np.ones(12, np.float32), after, np.ones(12))
    model = algo.build_model()
    assert np.isfinite(number(learned(algo, model, batch, path, target=algo.build_model())[0].loss))
