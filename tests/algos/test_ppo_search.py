"""PPO with search: what acts is on record, and the loss is the one that is stated."""

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers.batches import loss_of
from helpers.row_cartpole import make

import corral
from corral.acting.policy import ActContext
from corral.acting.sampler import Sampler
from corral.algos.ppo import Config as PpoConfig
from corral.algos.search.ppo_search import Config, PpoSearch, bootstrap
from corral.algos.search.search_acting import SearchBehaviour
from corral.algos.trajectories import compute_values
from corral.core.types import EnvSpec
from corral.planning.action_set import choose_action_set
from corral.planning.config import SearchConfig
from corral.testing.tasks import HybridWalk

SPEC = EnvSpec(spaces.Box(-np.inf, np.inf, (4,), np.float32), spaces.Discrete(2), "CartPole")


def trajectory(config, factory=make, steps=32, num_envs=4, seed=0):
    """An algorithm, its network, and a trajectory that it has acted."""
    with corral.make_vec(factory, num_envs, "local", seed=seed) as vec:
        algo = PpoSearch(config, vec.spec, num_envs)
        torch.manual_seed(seed)
        model = algo.build_model()
        policy = algo.make_policy(model, explore=True, rng=np.random.default_rng(seed))
        with Sampler(vec, policy) as sampler:
            return algo, model, next(sampler.rollouts(steps)), policy


def config(**changes):
    return Config(**({"num_simulations": 8, "search_fraction": 0.5, "min_explained_variance": -9.0} | changes))


def log_pi(model, obs):
    with torch.no_grad():
        return torch.log_softmax(model(torch.from_numpy(obs.reshape(-1, obs.shape[-1])))[0], -1).numpy()


def test_simulations_may_be_between_whole_numbers():
    for sims in ("8.7", "1:8.5", 1.5):
        _, _, _, policy = trajectory(config(num_simulations=sims, search_fraction=1.0), steps=2)
        assert policy.simulator_steps >= 8


# -- acting --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("beta", "epsilon"), [(0.0, 0.0), (0.6, 0.0), (1.0, 0.25), (0.5, 1.0)])
def test_recorded_log_prob_is_of_the_mixture(beta, epsilon):
    """(1 - epsilon) ((1 - beta) pi + beta search) + epsilon uniform, at the action that was taken."""
    _, model, traj, _ = trajectory(config(search_acts_fraction=beta, random_action_fraction=epsilon))
    extras = {name: value.reshape(-1, *value.shape[2:]) for name, value in traj.extras.items()}
    pi = np.exp(log_pi(model, traj.obs[:-1]))
    searched = extras["distill"] > 0
    mu = np.where(searched[:, None], (1 - beta) * pi + beta * extras["better"], pi)
    mu = (1 - epsilon) * mu + epsilon / 2
    chosen = traj.action.reshape(-1)
    rows = np.arange(len(chosen))
    np.testing.assert_allclose(np.exp(extras["behaviour"]), mu[rows, chosen], rtol=1e-4)
    np.testing.assert_allclose(np.exp(extras["logp"]), pi[rows, chosen], rtol=1e-4)
    assert 0.3 < searched.mean() < 0.7


def test_action_frequencies_match_recorded_probabilities():
    """Over many draws, the share of each action is its probability in mu: a chi-squared of a fixed seed."""
    _, _, traj, _ = trajectory(
        config(search_acts_fraction=1.0, search_fraction=1.0, random_action_fraction=0.3), steps=256, num_envs=8
    )
    chosen, mu = traj.action.reshape(-1), np.exp(traj.extras["behaviour"].reshape(-1))
    right = np.where(chosen == 1, mu, 1 - mu)
    seen, expected, spread = (chosen == 1).sum(), right.sum(), (right * (1 - right)).sum()
    assert abs(seen - expected) < 4 * np.sqrt(spread)


def test_temperature_changes_acting_but_not_targets():
    sharp, flat = (
        trajectory(config(search_acts_fraction=1.0, search_fraction=1.0, temperature=t))[2].extras for t in (0.1, 5.0)
    )
    np.testing.assert_array_equal(sharp["better"][0], flat["better"][0])
    assert np.exp(sharp["behaviour"]).mean() > np.exp(flat["behaviour"]).mean()


def test_an_expert_searches_every_step_and_acts_by_it():
    _, _, traj, _ = trajectory(config(search_mode="expert", temperature=1.0))
    assert (traj.extras["distill"] > 0).all()
    rows = np.arange(traj.action.size)
    by_search = traj.extras["better"].reshape(-1, 2)[rows, traj.action.reshape(-1)]
    np.testing.assert_allclose(np.exp(traj.extras["behaviour"].reshape(-1)), by_search, rtol=1e-4)


def test_schedules_follow_progress():
    _, model, _, _ = trajectory(config())
    algo = PpoSearch(config(search_fraction="0:1", num_simulations="2:6"), SPEC, 4)
    with corral.make_vec(make, 4, "local") as vec:
        policy = algo.make_policy(model, explore=True, rng=np.random.default_rng(0))
        with Sampler(vec, policy) as sampler:
            rollouts = sampler.rollouts(16)
            assert not (next(rollouts).extras["distill"] > 0).any()
            before = policy.simulator_steps
            policy.set_context(ActContext(1.0))
            assert (next(rollouts).extras["distill"] > 0).all()
            made = policy.simulator_steps - before
            assert 16 * 4 * 6 * 0.8 <= made <= 16 * 4 * 6  # fewer where episodes end within the search


def test_planning_leaves_envs_unchanged():
    """With the same actions, environments that were searched go where others go."""
    _, _, traj, _ = trajectory(
        config(search_fraction=1.0, search_acts_fraction=1.0), factory=lambda: gymnasium.make("CartPole-v1"), steps=64
    )
    with corral.make_vec(lambda: gymnasium.make("CartPole-v1"), 4, "local", seed=0) as vec:
        np.testing.assert_array_equal(vec.recv().obs, traj.obs[0])
        for t in range(64):
            vec.send(np.arange(4), traj.action[t])
            batch = vec.recv()
            np.testing.assert_array_equal(batch.obs, traj.obs[t + 1])
            np.testing.assert_array_equal(batch.terminated, traj.terminated[t])


class Ledger(gymnasium.Env):
    """Adds up what it is given, pays what it has, and shows nothing of it."""

    observation_space, action_space = spaces.Box(0, 1, (1,), np.float32), spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.has = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.has += int(action)
        return np.zeros(1, np.float32), float(self.has), False, False, {}


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_tree_is_reused_below_the_taken_action_only(share):
    """States look alike here, so only the action says where a tree goes on: q(a) must be what the state pays for a."""
    settings = config(
        search_fraction=share,
        random_action_fraction=0.3,
        search=SearchConfig(reuse_tree=True),
        ppo=PpoConfig(gamma=0.0),
    )
    with corral.make_vec(Ledger, 4, "local") as vec:
        algo = PpoSearch(settings, vec.spec, 4)
        policy = algo.make_policy(algo.build_model(), explore=True, rng=np.random.default_rng(0))
        policy.bind_envs(vec)
        batch, reused = vec.recv(), 0
        for _ in range(12):
            has = np.array([vec.environment(i).unwrapped.has for i in range(4)])
            action, _, extras = policy.act(batch.obs, np.arange(4), batch.first)
            rows, forest = np.flatnonzero(extras["distill"]), policy._planner.search.forest
            q = forest.total[rows, 0] / forest.n[rows, 0]
            np.testing.assert_allclose(q, has[rows, None] + [0, 1])
            reused += int((forest.n[rows, 0].sum(1) > 8).sum())
            vec.send(batch.env_ids, action)
            batch = vec.recv()
        assert reused


# -- learning ------------------------------------------------------------------------------------------------


def literal_loss(algo, model, rows, clip):
    """The formula of the module, row by row."""
    settings = algo.config
    params, value = (out.detach().numpy() for out in model(rows.obs))
    advantage = rows.advantages.numpy()
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    total = {"policy": 0.0, "value": 0.0, "entropy": 0.0, "distill": 0.0}
    for i in range(len(rows)):
        logp = params[i] - np.log(np.exp(params[i]).sum())
        action = int(rows.action[i, 0])
        ratio = np.exp(logp[action] - rows.old_log_prob[i].item())
        weighed = advantage[i] * rows.trust[i].item()
        total["policy"] -= min(ratio * weighed, np.clip(ratio, 1 - clip, 1 + clip) * weighed)
        total["value"] += 0.5 * (value[i] - rows.returns[i].item()) ** 2
        total["entropy"] -= (np.exp(logp) * logp).sum()
        total["distill"] -= rows.distill[i].item() * (rows.better[i].numpy() * logp).sum()
    n, ppo = len(rows), settings.ppo
    of_policy = total["distill"] if settings.search_mode == "expert" else total["policy"] + total["distill"]
    return (of_policy + ppo.vf_coef * total["value"] - ppo.ent_coef * total["entropy"]) / n


@pytest.mark.parametrize("mode", ["ppo+distill", "expert"])
def test_the_loss_is_the_stated_one(mode):
    settings = config(
        search_mode=mode,
        search_acts_fraction=0.5,
        random_action_fraction=0.1,
        search_value_fraction=0.3,
        max_importance_weight=2.0,
        ppo=PpoConfig(ent_coef=0.02),
    )
    algo, model, traj, _ = trajectory(settings)
    rows = algo.prepare(model, traj)
    with torch.no_grad():  # so that ratios are not 1
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    loss = loss_of(algo, model, None, rows).loss.item()
    assert loss == pytest.approx(literal_loss(algo, model, rows, 0.2), rel=1e-4)


def test_target_kl_stops_epochs_whatever_searches_acted():
    """KL(pi_old, pi) by samples of mu is the mean of pi_old / mu (r - 1 - log r)."""
    settings = config(
        search_acts_fraction=0.5, random_action_fraction=0.2, max_importance_weight=1e9, ppo=PpoConfig(target_kl=0.002)
    )
    algo, model, traj, _ = trajectory(settings)
    rows = algo.prepare(model, traj)
    assert not loss_of(algo, model, None, rows).stop
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    output = loss_of(algo, model, None, rows)
    chosen = rows.action[:, 0].long().numpy()
    log_ratio = log_pi(model, rows.obs.numpy())[np.arange(len(rows)), chosen] - rows.old_log_prob.numpy()
    trust = np.exp(traj.extras["logp"] - traj.extras["behaviour"]).reshape(-1)
    expected = np.mean(trust * (np.exp(log_ratio) - 1 - log_ratio))
    assert float(output.metrics["loss/kl"]) == pytest.approx(expected, rel=1e-3)
    assert expected > 1.5 * 0.002
    assert output.stop


def test_trust_is_bounded_ratio_of_policy_to_behaviour():
    algo, model, traj, _ = trajectory(config(search_acts_fraction=1.0, search_fraction=1.0, max_importance_weight=1.5))
    trust = algo.prepare(model, traj).trust.numpy()
    ratio = np.exp(traj.extras["logp"] - traj.extras["behaviour"]).reshape(-1)
    np.testing.assert_allclose(trust, np.minimum(ratio, 1.5), rtol=1e-5)
    assert trust.max() == pytest.approx(1.5)
    assert trust.min() < 1


def test_gate_closes_while_critic_explains_nothing():
    algo, model, traj, _ = trajectory(config(min_explained_variance=0.99))
    assert not algo.prepare(model, traj).distill.any()
    algo, model, traj, _ = trajectory(config(min_explained_variance=-9.0))
    assert algo.prepare(model, traj).distill.any()


@pytest.mark.parametrize(("bound", "trusted"), [(-0.1, True), (0.0, False), (0.3, False)])
def test_gate_takes_returns_that_do_not_vary_for_0(bound, trusted):
    algo, model, traj, _ = trajectory(config(min_explained_variance=bound))
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    traj.reward[:] = 0.0
    assert algo.prepare(model, traj).distill.any() == trusted


def test_gate_ignores_faulty_steps():
    algo, model, traj, _ = trajectory(config(min_explained_variance=-0.1))
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    traj.reward[:] = 0.0
    traj.faulty[5, 1] = True
    traj.reward[5, 1] = 99.0
    assert algo.prepare(model, traj).distill.any()


def test_bootstrap_uses_search_value_of_searched_successor():
    after = np.array([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]])
    done = np.array([[False, True], [False, False], [False, False]])
    search = np.array([[0.0, 0.0], [10.0, 10.0], [20.0, 20.0]])
    kappa = np.array([[0.0, 0.0], [0.5, 0.5], [0.0, 0.25]])
    np.testing.assert_allclose(bootstrap(after, done, search, kappa), [[5.5, 1.0], [2.0, 6.5], [3.0, 3.0]])


@pytest.mark.parametrize("lam", [0.0, 0.7, 1.0])
def test_returns_use_search_value_only_at_their_end(lam):
    """R[t] = r + gamma ((1 - lam) v[t + 1] + lam R[t + 1]), v = (1 - kappa) V + kappa v_search; with lam=1 no v counts
    but the last.
    """
    gamma = 0.9
    algo, model, traj, _ = trajectory(
        config(search_fraction=1.0, search_value_fraction=0.5, ppo=PpoConfig(gamma=gamma, gae_lambda=lam)), steps=40
    )
    traj.extras["search_value"] += 100.0  # a search that hopes for much
    value, after = compute_values(model, traj)
    steps, envs = traj.reward.shape
    expected = np.zeros((steps, envs))
    for b in range(envs):
        for t in reversed(range(steps)):
            bootstrap = float(after[t, b])
            goes_on = t + 1 < steps and not traj.done[t, b]
            if goes_on:
                bootstrap = 0.5 * bootstrap + 0.5 * float(traj.extras["search_value"][t + 1, b])
            later = (1 - lam) * bootstrap + lam * expected[t + 1, b] if goes_on else bootstrap
            expected[t, b] = traj.reward[t, b] + gamma * later * (not traj.terminated[t, b])
    assert traj.done.any()
    rows = algo.prepare(model, traj)
    np.testing.assert_allclose(rows.returns.numpy(), expected.reshape(-1), rtol=1e-4)
    np.testing.assert_allclose(rows.advantages.numpy(), (expected - value).reshape(-1), rtol=1e-4)


def test_without_search_it_is_ppo_bit_for_bit(tmp_path):
    """Modes ppo and eval train as ppo does."""
    same = {"steps": 4_000, "seed": 5, "num_envs": 4, "backend": "local", "eval_episodes": 0}
    corral.train("ppo", env="CartPole-v1", preset="none", run_dir=tmp_path / "ppo", **same)
    corral.train("ppo-search", env="CartPole-v1", preset="none", search_mode="eval", run_dir=tmp_path / "eval", **same)
    one, other = (corral.load_policy(tmp_path / name).model.state_dict() for name in ("ppo", "eval"))
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_searched_hybrid_actions_train_by_cross_entropy():
    algo, model, traj, policy = trajectory(config(search_acts_fraction=1.0), HybridWalk)
    assert isinstance(policy, SearchBehaviour)
    dense = np.isfinite(traj.extras["behaviour"])
    searched = traj.extras["distill"] > 0
    assert not (dense & searched).any()
    assert dense[~searched].all()
    rows = algo.prepare(model, traj)
    np.testing.assert_array_equal(rows.trust.numpy() == 0, ~dense.reshape(-1))
    assert rows.edges.shape == (traj.action["sign"].size, 16, 2)
    np.testing.assert_allclose(traj.extras["better"][searched].sum(-1), 1.0, rtol=1e-5)
    output = loss_of(algo, model, None, rows)
    params, _ = model(rows.obs)
    k = int(np.flatnonzero(searched.reshape(-1))[0])
    logp, _ = model.actions.evaluate(params[k].expand(16, -1), rows.edges[k])
    by_hand = -(rows.better[k] * logp).sum()
    apart = algo._cross_entropy(model, params, rows)
    assert apart[k].item() == pytest.approx(by_hand.item(), rel=1e-5)
    assert np.isfinite(output.loss.item())


def test_targets_hold_only_actions_that_policy_drew():
    """The likeliest action among equal samples would narrow the policy; for play it is there."""
    layout = EnvSpec(spaces.Box(-1, 1, (1,), np.float32), spaces.Box(-1, 1, (2,), np.float32)).action
    params = np.zeros((1, 4), np.float32)
    rng = np.random.default_rng(0)
    legal = np.ones((1, 8), np.bool_)
    learned = choose_action_set(layout, 8, likeliest=False).offer(params, legal, rng)[1]
    played = choose_action_set(layout, 8).offer(params, legal, rng)[1]
    assert (played[0, 0] == 0).all()
    assert not (learned == 0).any()
