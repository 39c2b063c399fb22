"""The learner: flat weights, clipping, what is left out, and going on from a saved state."""

import copy

import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers.batches import learned
from helpers.fragments import Stream, fragment
from helpers.short_runs import learn
from torch import nn

from corral.algos import a2c, dqn, ppo
from corral.algos.base import ParamGroup
from corral.core.errors import RunFailed
from corral.core.types import EnvSpec, Sample, Transitions
from corral.learn.device import Precision, choose, use_channels_last
from corral.learn.learner import Learner
from corral.learn.weights import FlatParams
from corral.nets.actor_critic import ActorCritic
from corral.nets.config import NetConfig
from corral.ops.optim import adam
from corral.topologies.base import build_model

torch.set_num_threads(1)  # for small networks more only wait for each other

FP32 = Precision("fp32", "")
SPEC = EnvSpec(spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(4))
PIXELS = EnvSpec(spaces.Box(0, 255, (2, 36, 36), np.uint8), spaces.Discrete(3))


def make_dqn(seed=0, report=lambda text: None, **settings):
    torch.manual_seed(seed)
    algo = dqn.Dqn(dqn.Config(**settings), SPEC, 1)
    return Learner(algo, algo.build_model(), torch.Generator().manual_seed(1), FP32, report=report)


def transitions(seed=0, n=32, **changes):
    rng = np.random.default_rng(seed)
    columns = {
        "obs": rng.normal(size=(n, 3)).astype(np.float32),
        "action": rng.integers(0, 4, n),
        "reward": rng.normal(size=n).astype(np.float32),
        "discount": np.full(n, 0.9, np.float32),
        "next_obs": rng.normal(size=(n, 3)).astype(np.float32),
        "weight": np.ones(n, np.float32),
    }
    return Sample(Transitions(**(columns | changes)))


def weights_of(learner):
    return learner.flat.weights.detach().clone()


def same(a, b):
    """Whether two states are, bit by bit."""
    return a.keys() == b.keys() and all(torch.equal(torch.as_tensor(a[k]), torch.as_tensor(b[k])) for k in a)


# -- flat weights ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [SPEC, PIXELS])
def test_flat_weights_and_gradients_are_the_networks_own(spec):
    model = ActorCritic(spec, NetConfig())
    use_channels_last(model)
    before = [param.detach().clone() for param in model.parameters()]
    strides = [param.stride() for param in model.parameters()]
    flat = FlatParams(model, [ParamGroup(adam, lambda progress: 0.1)])
    for param, old, stride in zip(model.parameters(), before, strides, strict=True):
        assert torch.equal(param, old)
        assert param.stride() == stride
        assert param.grad.stride() == stride
    flat.weights.data.fill_(0.5)
    flat.grad.fill_(0.25)
    assert all((param == 0.5).all() and (param.grad == 0.25).all() for param in model.parameters())
    flat.grad.zero_()
    obs = torch.zeros(2, *spec.observation_space.shape, dtype=torch.uint8 if spec is PIXELS else torch.float32)
    params, value = model(obs)
    (params.sum() + value.sum()).backward()
    assert flat.grad.abs().sum() > 0
    assert sum(int((param.grad != 0).sum()) for param in model.parameters()) == int((flat.grad != 0).sum())


def test_convolutions_keep_channels_last_through_updates():
    algo = ppo.Ppo(ppo.Config(), PIXELS, 2)
    model = algo.build_model()
    use_channels_last(model)
    flat = FlatParams(model, algo.groups())
    convs = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    model(torch.zeros(2, 2, 36, 36, dtype=torch.uint8))[1].sum().backward()
    algo.groups()[0].optimizer([flat.weights]).step()
    for conv in convs:
        assert conv.weight.is_contiguous(memory_format=torch.channels_last)
        assert conv.weight.untyped_storage().data_ptr() == flat.weights.untyped_storage().data_ptr()


@pytest.mark.parametrize("algo", [ppo.Ppo(ppo.Config(), SPEC, 1), a2c.A2c(a2c.Config(), SPEC, 1)])
def test_a_flat_optimizer_step_is_one_per_weight(algo):
    torch.manual_seed(0)
    model = algo.build_model()
    plain = copy.deepcopy(model)
    (group,) = algo.groups()
    flat = FlatParams(model, [group])
    flat_optimizer, optimizer = group.optimizer([flat.weights]), group.optimizer(plain.parameters())
    for k in range(5):
        obs = torch.randn(8, 3, generator=torch.Generator().manual_seed(k))
        flat.grad.zero_()
        plain.zero_grad()
        for net in (model, plain):
            params, value = net(obs)
            (params.square().sum() + (value - k).square().sum()).backward()
        flat_optimizer.step()
        optimizer.step()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("limit", [1e-3, 0.5, 1e9])
def test_gradients_are_clipped_by_their_global_norm(limit):
    learner = make_dqn(max_grad_norm=limit)
    batch = transitions(reward=np.full(32, 50, np.float32))
    plain, target = make_dqn(max_grad_norm=limit).algo.build_model(), copy.deepcopy(learner.target)
    plain.load_state_dict(learner.model.state_dict())
    learned(learner.algo, plain, batch.batch, target=target)
    norm = nn.utils.clip_grad_norm_(plain.parameters(), limit)
    (output,) = learner.step(batch, 0.0)
    assert output.metrics["loss/grad_norm"] == pytest.approx(float(norm), rel=1e-5)
    assert float(learner.flat.grad.norm()) <= limit * (1 + 1e-5)
    for param, expected in zip(learner.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param.grad, expected.grad, atol=1e-7, rtol=1e-5)


def test_the_learning_rate_follows_progress():
    learner = make_dqn(learning_rate=0.1, anneal_lr=True)
    for progress, lr in ((0.0, 0.1), (0.25, 0.075), (1.0, 0.0)):
        before = weights_of(learner)
        learner.step(transitions(), progress)
        assert learner.learning_rates(progress) == {"learn/lr": pytest.approx(lr)}
        assert torch.equal(before, weights_of(learner)) == (lr == 0)


# -- what is not finite ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "source"),
    [
        ({"reward": np.full(32, np.nan, np.float32)}, "reward"),
        ({"reward": np.full(32, np.inf, np.float32)}, "reward"),
        ({"obs": np.full((32, 3), np.nan, np.float32)}, "observation"),
        ({"discount": np.full(32, np.inf, np.float32)}, "loss"),
    ],
)
def test_not_finite_update_is_skipped_and_named(changes, source):
    said = []
    learner = make_dqn(report=said.append, target_update_period=1)
    learner.step(transitions(), 0.0)
    before, target = weights_of(learner), copy.deepcopy(learner.target.state_dict())
    optimizer = copy.deepcopy(learner.state_dict()["optimizer"])
    assert learner.step(transitions(**changes), 0.0) == []
    assert torch.equal(weights_of(learner), before)
    assert same(learner.target.state_dict(), target)
    assert same(learner.state_dict()["optimizer"], optimizer)
    assert (learner.version, learner.skipped) == (1, 1)
    assert len(said) == 1
    assert source in said[0]
    learner.step(transitions(), 0.0)
    assert (learner.version, learner.skipped) == (2, 1)
    assert torch.isfinite(weights_of(learner)).all()


def test_a_gradient_that_is_not_finite_is_named():
    said = []
    learner = make_dqn(report=said.append)
    before = weights_of(learner)
    learner.model.numpy_towers[0].backward = lambda *args: learner.flat.grad.fill_(float("inf"))
    learner.step(transitions(), 0.0)
    assert "gradient" in said[0]
    assert torch.equal(weights_of(learner), before)


def inserted(seed=0, obs=0.0):
    """A fragment of 8 steps that enters the replay store."""
    traj = fragment([Stream(SPEC, seed, end=0.0)], [0], 8)[0]
    traj.obs += np.float32(obs)
    return traj


@pytest.mark.parametrize(
    ("algo", "settings"),
    [
        ("dqn", {"learning_starts": 100, "train_frequency": 8, "prioritized_replay": True}),
        ("impala", {"num_steps": 8, "batch_size": 8, "replay_fraction": 0.5, "buffer_size": 20}),
    ],
)
def test_replayed_observations_are_counted_once(algo, settings):
    rows = []
    trainer = learn(algo, "CartPole-v1", 600, normalize_obs=True, on_rollout=rows.append, **settings)
    norm = trainer.model.encoder.norm
    seen = np.concatenate([traj.obs[:-1].reshape(-1, 4) for traj in rows]).astype(np.float64)
    counted = seen[: int(norm.count)]  # the last update was made before the last fragments
    assert len(counted) > 500
    np.testing.assert_allclose(norm.mean, counted.mean(0), atol=1e-9)
    np.testing.assert_allclose(norm.squares / norm.count, counted.var(0), rtol=1e-6)


def test_obs_statistics_ignore_not_finite_rows():
    learner = make_dqn(net=NetConfig(activation="relu", normalize_obs=True))
    learner.observe(inserted())
    learner.step(transitions(), 0.0)
    before = learner.model.encoder.norm.mean.clone()
    learner.observe(inserted(obs=np.nan))
    learner.step(transitions(), 0.0)
    assert torch.equal(learner.model.encoder.norm.mean, before)


def test_ten_not_finite_updates_in_a_row_fail():
    learner = make_dqn()
    bad = transitions(reward=np.full(32, np.nan, np.float32))
    for _ in range(9):
        learner.step(bad, 0.0)
    learner.step(transitions(), 0.0)
    for _ in range(9):
        learner.step(bad, 0.0)
    with pytest.raises(RunFailed, match="10 consecutive updates had a reward that is not finite"):
        learner.step(bad, 0.0)


# -- saved and loaded --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings", [{}, {"target_update_period": 3, "tau": 0.3}, {"net": NetConfig(normalize_obs=True)}]
)
def test_the_next_update_after_loading_is_bit_equal(settings):
    learner = make_dqn(**settings)
    for k in range(4):
        learner.observe(inserted(k))
        learner.step(transitions(k), 0.1 * k)
    learner.observe(inserted(9))
    state = copy.deepcopy(learner.state_dict())
    other = make_dqn(seed=9, **settings)
    other.step(transitions(77), 0.5)
    other.load_state_dict(state)
    for k in range(4, 8):
        learner.step(transitions(k), 0.1 * k)
        other.step(transitions(k), 0.1 * k)
        assert torch.equal(weights_of(learner), weights_of(other))
    assert learner.version == other.version == 8
    mine, theirs = learner.state_dict(), other.state_dict()
    for part in ("model", "target", "optimizer"):
        assert same(mine[part], theirs[part])
    assert torch.equal(mine["rng"], theirs["rng"])
    # weights and gradients are still the flat ones, so the optimizer moves what the network uses
    other.flat.weights.data.fill_(0.25)
    assert all((param == 0.25).all() for param in other.model.parameters())


# -- the target network ----------------------------------------------------------------------------------------


def test_the_target_network_is_copied_every_so_many_updates():
    learner = make_dqn(target_update_period=3, learning_rate=0.01)
    copies = [copy.deepcopy(dict(learner.model.state_dict()))]
    for k in range(7):
        learner.step(transitions(k), 0.0)
        copies.append(copy.deepcopy(dict(learner.model.state_dict())))
        expected = copies[3 * ((k + 1) // 3)]
        assert all(torch.equal(learner.target.state_dict()[name], expected[name]) for name in expected)


def test_a_soft_target_network_moves_by_tau():
    learner = make_dqn(target_update_period=1, tau=0.1, learning_rate=0.01)
    expected = {name: value.clone() for name, value in learner.target.state_dict().items()}
    for k in range(5):
        learner.step(transitions(k), 0.0)
        for name, value in learner.model.state_dict().items():
            expected[name] = 0.9 * expected[name] + 0.1 * value
    for name, value in learner.target.state_dict().items():
        torch.testing.assert_close(value, expected[name], atol=1e-6, rtol=1e-5)


def test_the_target_network_normalises_as_the_network_does():
    learner = make_dqn(target_update_period=100, net=NetConfig(normalize_obs=True))
    for k in range(3):
        learner.observe(inserted(k))
        learner.step(transitions(k), 0.0)
    mine, theirs = learner.model.encoder.norm.state_dict(), learner.target.encoder.norm.state_dict()
    assert float(mine["count"]) == 24
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_initial_weights_do_not_depend_on_the_number_of_threads():
    algo = ppo.Ppo(ppo.Config(net=NetConfig(hidden_sizes=(256, 256))), SPEC, 1)
    drawn = []
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        try:
            drawn.append(torch.cat([p.detach().reshape(-1) for p in build_model(algo, 3).parameters()]))
            assert torch.get_num_threads() == threads
        finally:
            torch.set_num_threads(1)
    assert torch.equal(drawn[0], drawn[1])
    assert torch.equal(drawn[0], drawn[2])


def test_precision_without_an_encoder_is_not_measured():
    chosen = choose("auto", nn.Sequential(nn.Conv2d(1, 1, 3)), PIXELS.observation)
    assert (chosen.name, chosen.why) == ("fp32", "only image encoders run in bf16")
