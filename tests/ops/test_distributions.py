"""Distributions of actions against literal NumPy, and what the environment gets of them."""

import warnings

import numpy as np
import pytest
import torch
from gymnasium import spaces

from corral.core.errors import UserError
from corral.core.spaces import Layout
from corral.ops.distributions import Actions, JointChoices

torch.set_num_threads(1)  # for small networks more only wait for each other
HYBRID = spaces.Dict(
    {
        "gear": spaces.Discrete(3, start=1),
        "move": spaces.Tuple((spaces.Box(-2, 5, (2,), np.float32), spaces.MultiBinary(2))),
        "keys": spaces.MultiDiscrete([2, 5]),
        "free": spaces.Box(-np.inf, np.inf, (1,), np.float64),
    }
)
SPACES = {
    "discrete": spaces.Discrete(4),
    "started": spaces.Discrete(3, start=-1),
    "multi_discrete": spaces.MultiDiscrete([[2, 3], [4, 2]]),
    "multi_binary": spaces.MultiBinary(3),
    "box": spaces.Box(-1, 1, (2,), np.float32),
    "wide_box": spaces.Box(np.array([-0.1, 3.0]), np.array([0.7, 1e4]), dtype=np.float64),
    "half_bounded": spaces.Box(np.array([0.0, -np.inf]), np.array([np.inf, 1.0]), dtype=np.float32),
    "hybrid": HYBRID,
}


def params_of(actions, n, seed=0, scale=1.5):
    rng = np.random.default_rng(seed)
    params = rng.normal(size=(n, actions.param_size)).astype(np.float32) * scale
    if actions.num_numbers:
        params[:, -actions.num_numbers :] = rng.uniform(-2, 1, (n, actions.num_numbers))
    return params


def literal(actions, params, action):
    """Log-probabilities and entropies from the textbook, one row and one part at a time, in float64."""
    logps, entropies = [], []
    for row, taken in zip(params.astype(np.float64), action.astype(np.float64), strict=True):
        at, logp, entropy = 0, 0.0, 0.0
        for k, size in enumerate(actions.sizes):
            weights = np.exp(row[at : at + size] - row[at : at + size].max())
            p = weights / weights.sum()
            logp += np.log(p[int(taken[k])])
            entropy -= sum(x * np.log(x) for x in p)
            at += size
        count = actions.num_numbers
        for j in range(count):
            mean, std, x = row[at + j], np.exp(row[at + count + j]), taken[len(actions.sizes) + j]
            logp += -((x - mean) ** 2) / (2 * std**2) - np.log(std * np.sqrt(2 * np.pi))
            entropy += 0.5 * np.log(2 * np.pi * np.e * std**2)
        logps.append(logp)
        entropies.append(entropy)
    return np.array(logps), np.array(entropies)


@pytest.mark.parametrize("name", SPACES)
def test_log_probabilities_and_entropies_are_the_textbooks(name):
    actions = Actions(Layout(SPACES[name]))
    params = params_of(actions, 50)
    action, logp = actions.sample(params, np.random.default_rng(1))
    assert action.shape == (50, actions.action_size)
    assert (action.dtype, logp.dtype) == (np.float32, np.float32)
    expected, spread = literal(actions, params, action)
    np.testing.assert_allclose(logp, expected, atol=2e-4, rtol=1e-4)
    again, entropy = actions.evaluate(torch.from_numpy(params), torch.from_numpy(action))
    np.testing.assert_allclose(again.numpy(), expected, atol=2e-4, rtol=1e-4)
    np.testing.assert_allclose(entropy.numpy(), spread, atol=1e-4, rtol=1e-4)
    np.testing.assert_allclose(again.numpy(), logp, atol=1e-5, rtol=1e-5)  # so that a ratio of both is 1


@pytest.mark.parametrize("name", SPACES)
def test_evaluate_takes_any_leading_shape(name):
    actions = Actions(Layout(SPACES[name]))
    params = torch.from_numpy(params_of(actions, 12))
    action = torch.from_numpy(actions.sample(params.numpy(), np.random.default_rng(0))[0])
    flat = actions.evaluate(params, action)
    folded = actions.evaluate(params.unflatten(0, (3, 4)), action.unflatten(0, (3, 4)))
    for a, b in zip(flat, folded, strict=True):
        assert b.shape == (3, 4)
        assert torch.equal(a, b.flatten())


@pytest.mark.parametrize("name", SPACES)
def test_gradients_are_those_of_the_textbook_formulas(name):
    actions = Actions(Layout(SPACES[name]))
    params = params_of(actions, 20)
    action = torch.from_numpy(actions.sample(params, np.random.default_rng(2))[0]).double()
    rng = np.random.default_rng(3)
    grad_logp, grad_entropy = torch.from_numpy(rng.normal(size=(2, 20)))

    def gradient(fn):
        leaf = torch.from_numpy(params).double().requires_grad_()
        logp, entropy = fn(leaf)
        (logp * grad_logp + entropy * grad_entropy).sum().backward()
        return leaf.grad.numpy()

    def plain(leaf):
        logp = entropy = torch.zeros(20, dtype=torch.float64)
        at = 0
        for k, size in enumerate(actions.sizes):
            part = torch.distributions.Categorical(logits=leaf[:, at : at + size])
            logp, entropy = logp + part.log_prob(action[:, k]), entropy + part.entropy()
            at += size
        if actions.num_numbers:
            mean, log_std = leaf[:, at:].chunk(2, -1)
            part = torch.distributions.Normal(mean, log_std.exp())
            logp = logp + part.log_prob(action[:, len(actions.sizes) :]).sum(-1)
            entropy = entropy + part.entropy().sum(-1)
        return logp, entropy

    np.testing.assert_allclose(gradient(lambda leaf: actions.evaluate(leaf, action)), gradient(plain), atol=1e-9)


def chi_square(counts, probabilities):
    expected = counts.sum() * probabilities
    return float(((counts - expected) ** 2 / expected).sum())


def test_sampled_choices_have_their_probabilities():
    actions = Actions(Layout(spaces.MultiDiscrete([4, 3])))
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05, 0.2, 0.2, 0.6], np.float32))
    n = 60_000
    action, _ = actions.sample(np.tile(logits, (n, 1)), np.random.default_rng(4))
    joint = np.histogram2d(action[:, 0], action[:, 1], [4, 3], [[-0.5, 3.5], [-0.5, 2.5]])[0]
    expected = np.outer([0.5, 0.3, 0.15, 0.05], [0.2, 0.2, 0.6])
    assert chi_square(joint.reshape(-1), expected.reshape(-1)) < 31.3  # 0.1 % of 11 degrees of freedom


def test_rows_are_drawn_independently_of_each_other():
    actions = Actions(Layout(spaces.Discrete(2)))
    params = np.zeros((8, 2), np.float32)
    rng = np.random.default_rng(5)
    draws = np.stack([actions.sample(params, rng)[0][:, 0] for _ in range(4000)])
    correlation = np.corrcoef(draws.T) - np.eye(8)
    assert np.abs(correlation).max() < 0.07  # 4.4 standard errors


def test_numbers_have_the_mean_and_deviation_of_the_parameters():
    actions = Actions(Layout(spaces.Box(-1, 1, (3,), np.float32)))
    mean, std = np.array([-2.0, 0.0, 0.7]), np.array([0.1, 1.0, 3.0])
    n = 40_000
    params = np.tile(np.concatenate([mean, np.log(std)]).astype(np.float32), (n, 1))
    action, _ = actions.sample(params, np.random.default_rng(6))
    standard = (action - mean) / std
    assert np.abs(standard.mean(0)).max() < 4.5 / np.sqrt(n)
    assert np.abs(standard.var(0) - 1).max() < 4.5 * np.sqrt(2 / n)
    assert np.abs((standard**4).mean(0) - 3).max() < 4.5 * np.sqrt(96 / n)
    assert np.abs(np.corrcoef(standard.T) - np.eye(3)).max() < 4.5 / np.sqrt(n)


def test_an_impossible_choice_is_never_drawn_and_nothing_warns():
    actions = Actions(Layout(spaces.Discrete(3)))
    params = np.tile(np.array([0.0, -200.0, 0.0], np.float32), (500_000, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(8):  # a draw of exactly 0, which float32 has once in some millions, would win any race
            action, logp = actions.sample(params, np.random.default_rng(seed))
            assert not (action == 1).any()
            assert np.isfinite(logp).all()


@pytest.mark.parametrize("name", SPACES)
def test_the_mode_is_the_most_likely_action(name):
    actions = Actions(Layout(SPACES[name]))
    params = params_of(actions, 30)
    best = literal(actions, params, actions.mode(params))[0]
    for seed in range(20):
        other = actions.sample(params, np.random.default_rng(seed))[0]
        assert (literal(actions, params, other)[0] <= best + 1e-6).all()


@pytest.mark.parametrize("name", SPACES)
def test_the_environment_only_ever_sees_members_of_its_space(name):
    space = SPACES[name]
    actions = Actions(Layout(space))
    params = params_of(actions, 400, scale=4.0)
    if actions.num_numbers:
        params[:, -actions.num_numbers :] = 2.0  # wide: most samples lie out of bounds
    raw, _ = actions.sample(params, np.random.default_rng(7))
    for chosen in (raw, actions.mode(params), raw * 1e6 if actions.discrete is False and not actions.sizes else raw):
        tree = actions.to_env(chosen)
        leaves = actions.layout.flatten(tree)
        for i in range(400):
            member = actions.layout.unflatten([leaf[i] for leaf in leaves])
            assert space.contains(member), member


def test_bounded_numbers_reach_both_bounds_and_the_middle():
    space = spaces.Box(np.array([-0.1, 3.0]), np.array([0.7, 9.0]), dtype=np.float32)
    actions = Actions(Layout(space))
    got = actions.to_env(np.array([[-1, -1], [0, 0], [1, 1], [-50, 50]], np.float32))
    np.testing.assert_array_equal(got[0], space.low)
    np.testing.assert_allclose(got[1], [0.3, 6.0], rtol=1e-6)
    np.testing.assert_array_equal(got[2], space.high)
    np.testing.assert_array_equal(got[3], [space.low[0], space.high[1]])


def test_whole_numbers_in_a_box_are_refused_with_a_remedy():
    with pytest.raises(UserError, match="MultiDiscrete"):
        Actions(Layout(spaces.Box(0, 9, (2,), np.int32)))


CHOICES = {
    "discrete": (spaces.Discrete(4), 4),
    "started": (spaces.Discrete(3, start=-1), 3),
    "multi_discrete": (spaces.MultiDiscrete([[2, 3], [4, 2]]), 48),
    "multi_binary": (spaces.MultiBinary(3), 8),
    "several": (spaces.Dict({"b": spaces.Discrete(3, start=2), "a": spaces.Tuple((spaces.MultiBinary(2),))}), 12),
}


@pytest.mark.parametrize("name", CHOICES)
def test_joint_choices_number_every_combination_once(name):
    space, count = CHOICES[name]
    choices = JointChoices(Layout(space), "dqn")
    assert choices.count == count
    numbers = np.arange(count)
    tree = choices.to_env(numbers)
    np.testing.assert_array_equal(choices.from_env(tree), numbers)
    leaves = Layout(space).flatten(tree)
    members = [Layout(space).unflatten([leaf[i] for leaf in leaves]) for i in range(count)]
    assert all(space.contains(member) for member in members)
    assert len({repr(member) for member in members}) == count


@pytest.mark.parametrize(
    ("space", "words"),
    [
        (spaces.Box(-1, 1, (2,), np.float32), "needs discrete actions"),
        (spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Box(0, 1, (1,), np.float32)}), "'b'"),
        (spaces.MultiDiscrete([100, 100]), "10000"),
        (spaces.MultiBinary(64), "at most 4096"),
    ],
)
def test_joint_choices_refuse_continuous_spaces(space, words):
    with pytest.raises(UserError, match=words):
        JointChoices(Layout(space), "dqn")


def test_log_prob_is_of_the_rounded_action():
    actions = Actions(Layout(spaces.Box(-np.inf, np.inf, (1,), np.float32)))
    params = np.tile(np.array([1000.0, -4.0], np.float32), (200, 1))
    action, logp = actions.sample(params, np.random.default_rng(0))
    again, _ = actions.evaluate(torch.from_numpy(params), torch.from_numpy(action))
    np.testing.assert_allclose(again.numpy(), logp, atol=1e-5)


@pytest.mark.parametrize("name", ["discrete", "multi_discrete", "multi_binary", "box"])
def test_batch_in_two_halves_draws_equally(name):
    """So that it does not matter for whom a policy decides together."""
    actions = Actions(Layout(SPACES[name]))
    params = params_of(actions, 8)
    whole, halves = np.random.default_rng(8), np.random.default_rng(8)
    for _ in range(3):
        expected = actions.sample(params, whole)
        parts = [actions.sample(half, halves) for half in np.split(params, 2)]
        for k in range(2):
            np.testing.assert_array_equal(np.concatenate([part[k] for part in parts]), expected[k])
