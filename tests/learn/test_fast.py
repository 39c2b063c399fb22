"""Gradients that are written out in NumPy equal those that autograd finds for the losses as they are stated."""

import copy
import dataclasses
import typing

import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers.batches import SPECS, batch_for, observe, on_path, randomize

from corral.algos import a2c, appo, dqn, impala, ppo
from corral.algos.base import UpdateContext
from corral.algos.trajectories import Minibatch
from corral.core.types import EnvSpec, Transitions
from corral.learn.fast import FAST, find_fast_loss
from corral.learn.weights import FlatParams
from corral.nets.actor_critic import ActorCritic
from corral.nets.config import NetConfig

ACTIONS = {
    "discrete": spaces.Discrete(3, start=2),
    "multi-discrete": spaces.MultiDiscrete([3, 2]),
    "continuous": spaces.Box(-2.0, 2.0, (2,)),
    "hybrid": spaces.Dict({"move": spaces.Discrete(3), "force": spaces.Box(-1.0, 1.0, (2,))}),
}
OBSERVATIONS = {
    "vector": spaces.Box(-np.inf, np.inf, (5,)),
    "tree": spaces.Dict({"a": spaces.Box(-np.inf, np.inf, (3,)), "b": spaces.Discrete(4)}),
}


def twins(algo):
    """The same network twice: one that computes in NumPy, one in torch."""
    torch.manual_seed(0)
    plain = algo.build_model()
    for param in plain.parameters():  # away from the small weights of a fresh policy
        param.data.add_(0.2 * torch.randn_like(param))
    lean = copy.deepcopy(plain)
    flats = FlatParams(plain, algo.groups()), FlatParams(lean, algo.groups())
    assert lean.use_numpy()
    return plain, lean, flats


def rows_for(algo, model, n=37):
    rng = np.random.default_rng(1)
    obs = observations(algo.spec, n, rng)
    with torch.no_grad():
        params = model(obs)[0].numpy()
    action, logp = model.actions.sample(params, rng)
    value, advantage, target = (torch.from_numpy(rng.normal(size=n).astype(np.float32)) for _ in range(3))
    old = torch.from_numpy(logp + rng.normal(0, 0.3, n).astype(np.float32))  # ratios on both sides of the clip
    return Minibatch(obs, torch.from_numpy(action), old, value, advantage, target)


def observations(spec, n, rng):
    leaves = [
        torch.from_numpy(rng.normal(size=(n, *leaf.shape)).astype(np.float32))
        if leaf.dtype.kind == "f"
        else torch.from_numpy(rng.integers(0, 4, n))
        for leaf in spec.observation.leaves
    ]
    return spec.observation.unflatten(leaves)


def gradients(algo, model, flat, target, batch):
    flat.grad.zero_()
    fast = find_fast_loss(algo, model, target)
    ctx = UpdateContext(0.3, torch.Generator())
    output = (
        next(algo.losses(model, target, batch, ctx)) if fast is None else fast.compute(algo, model, target, batch, ctx)
    )
    (output.backward or output.loss.backward)()
    metrics = {name: float(torch.as_tensor(value).detach()) for name, value in output.metrics.items()}
    return float(torch.as_tensor(output.loss).detach()), flat.grad.clone(), metrics, output


@pytest.mark.parametrize("actions", ACTIONS)
@pytest.mark.parametrize("observation", OBSERVATIONS)
@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("normalize_obs", [False, True])
@pytest.mark.parametrize("kind", ["ppo", "a2c"])
def test_explicit_policy_losses_equal_autograd(actions, observation, activation, normalize_obs, kind):
    spec = EnvSpec(OBSERVATIONS[observation], ACTIONS[actions])
    net = NetConfig(hidden_sizes=(16, 8), activation=activation, normalize_obs=normalize_obs, log_std_init=-0.3)
    algo = {
        "ppo": lambda: ppo.Ppo(ppo.Config(net=net, ent_coef=0.05, clip_coef="0.2:0"), spec, 1),
        "a2c": lambda: a2c.A2c(a2c.Config(net=net, ent_coef=0.05), spec, 1),
    }[kind]()
    plain, lean, (plain_flat, lean_flat) = twins(algo)
    batch = rows_for(algo, plain)
    for model in (plain, lean):
        observe(model.encoder, batch.obs)
    expected = gradients(algo, plain, plain_flat, None, batch)
    found = gradients(algo, lean, lean_flat, None, batch)
    assert expected[3].backward is None
    assert found[3].backward is not None
    assert found[0] == pytest.approx(expected[0], abs=1e-5)
    torch.testing.assert_close(found[1], expected[1], atol=2e-6, rtol=2e-4)
    assert found[2] == pytest.approx(expected[2], abs=1e-5)


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("dueling", [False, True, "shared"])
@pytest.mark.parametrize("prioritised", [False, True])
def test_explicit_q_loss_equals_autograd(double, dueling, prioritised):
    spec = EnvSpec(OBSERVATIONS["vector"], ACTIONS["multi-discrete"])
    config = dqn.Config(
        double_q=double, dueling=dueling, prioritized_replay=prioritised, net=NetConfig(hidden_sizes=(16, 8))
    )
    algo = dqn.Dqn(config, spec, 1)
    plain, lean, (plain_flat, lean_flat) = twins(algo)
    rng = np.random.default_rng(2)
    n = 29
    batch = Transitions(
        observations(spec, n, rng).numpy(),
        algo.choices.to_env(rng.integers(0, 6, n)),
        rng.normal(0, 2, n).astype(np.float32),  # differences on both sides of the Huber loss's corner
        rng.choice([0.0, 0.97], n).astype(np.float32),
        observations(spec, n, rng).numpy(),
        rng.uniform(0.2, 1, n).astype(np.float32),
    )
    targets = copy.deepcopy(plain), copy.deepcopy(plain)
    for target in targets:
        (target.value_head if dueling is True else target.head).bias.data.add_(0.5)
    assert targets[1].use_numpy()
    expected = gradients(algo, plain, plain_flat, targets[0], batch)
    found = gradients(algo, lean, lean_flat, targets[1], batch)
    assert found[0] == pytest.approx(expected[0], abs=1e-5)
    torch.testing.assert_close(found[1], expected[1], atol=1e-6, rtol=1e-4)
    if prioritised:
        np.testing.assert_allclose(found[3].priorities, expected[3].priorities.numpy(), atol=1e-5)


def test_numpy_network_acts_with_latest_weights():
    spec = EnvSpec(OBSERVATIONS["vector"], ACTIONS["continuous"])
    algo = ppo.Ppo(ppo.Config(), spec, 1)
    plain, lean, (_, flat) = twins(algo)
    batch = rows_for(algo, plain)
    optimizer = algo.groups()[0].optimizer([flat.weights])
    before = lean.numpy_params(batch.obs.numpy())
    np.testing.assert_allclose(before, plain(batch.obs)[0].detach().numpy(), atol=1e-5)
    gradients(algo, lean, flat, None, batch)
    optimizer.step()
    after = lean.numpy_params(batch.obs.numpy())
    assert np.abs(after - before).max() > 1e-6
    np.testing.assert_allclose(after, lean(batch.obs)[0].detach().numpy(), atol=1e-5)
    with torch.no_grad():
        np.testing.assert_allclose(lean.value(batch.obs).numpy(), lean(batch.obs)[1].numpy(), atol=1e-5)


def test_large_inputs_saturate_without_a_warning():
    spec = EnvSpec(OBSERVATIONS["vector"], ACTIONS["discrete"])
    _, lean, _ = twins(ppo.Ppo(ppo.Config(), spec, 1))
    with np.errstate(all="raise", under="ignore"):
        assert np.isfinite(lean.numpy_params(np.full((4, 5), 1e4, np.float32))).all()


def test_flat_adam_equals_torch_and_restores():
    from corral.ops.optim import SmallAdam, adam

    torch.manual_seed(3)
    start = torch.randn(50)
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    small, reference = adam([ours], 1e-3, eps=1e-5), torch.optim.Adam([theirs], 1e-3, eps=1e-5)
    assert isinstance(small, SmallAdam)
    for k in range(60):
        grad = torch.randn(50) * 10 ** torch.randn(())
        ours.grad, theirs.grad = grad.clone(), grad.clone()
        small.step()
        reference.step()
        if k == 30:
            again = adam([ours], 1e-3, eps=1e-5)
            again.load_state_dict(small.state_dict())
            small = again
    torch.testing.assert_close(ours.data, theirs.data, atol=1e-6, rtol=1e-5)


# -- every setting: implemented and equal, or left to torch ------------------------------------------------------


FAST_ALGOS = {
    "ppo": (ppo, "Ppo"),
    "a2c": (a2c, "A2c"),
    "impala": (impala, "Impala"),
    "appo": (appo, "Appo"),
    "dqn": (dqn, "Dqn"),
}
NET = NetConfig(hidden_sizes=(8,), activation="tanh")


def changed(field, value):
    """Another value of a setting than its default."""
    choices = typing.get_args(field) if typing.get_origin(field) is typing.Literal else ()
    if choices:
        return next(choice for choice in choices if choice != value)
    if value is None:
        return 0.1
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, str):
        return "0.3:0.1"
    if isinstance(value, float):
        return 0.7 * value if value else 0.3
    assert isinstance(value, NetConfig), value
    return NetConfig(hidden_sizes=(8,), activation="relu", log_std_init=-0.5)


def every_setting():
    for name, (module, _) in FAST_ALGOS.items():
        types = typing.get_type_hints(module.Config)
        default = module.Config()
        for field in dataclasses.fields(default):
            yield name, field.name, changed(types[field.name], getattr(default, field.name))


@pytest.mark.parametrize(("name", "setting", "value"), list(every_setting()))
def test_every_setting_is_implemented_or_left_to_torch(name, setting, value):
    """A setting that the fast loss does not know must select the algorithm's own; all others give the same gradient."""
    module, class_name = FAST_ALGOS[name]
    config = module.Config(**({"net": NET} | {setting: value}))
    algo = getattr(module, class_name)(config, SPECS["discrete"], 4)
    model = randomize(algo.build_model(), scale=0.3)
    target = randomize(algo.build_model(), seed=1, scale=0.3) if algo.uses_target else None
    if name == "dqn":
        rng = np.random.default_rng(0)
        rows = [rng.normal(size=(20, 3)).astype(np.float32) for _ in range(2)]
        numbers = [rng.normal(0, 2, 20).astype(np.float32) for _ in range(2)]
        actions, weight = algo.choices.to_env(rng.integers(0, 4, 20)), rng.uniform(0.2, 1, 20).astype(np.float32)
        batch = Transitions(rows[0], actions, numbers[0], numbers[1], rows[1], weight)
    else:
        batch = algo.prepare(model, batch_for(algo, model, fault=0.05))
    networks = [on_path(net, "numpy") for net in (model, target) if net is not None]
    fast = find_fast_loss(algo, model, target)
    listed = setting in FAST[f"{module.__name__}:{class_name}"].settings
    assert (fast is not None) == listed
    if not listed:
        return
    assert fast.takes(batch)
    ctx = UpdateContext(0.4, torch.Generator())
    found = fast.compute(algo, model, target, batch, ctx)
    found.backward()
    by_hand = [param.grad.clone() for param in model.parameters()]
    for net in networks:
        on_path(net, "torch")
    (expected,) = algo.losses(model, target, batch, ctx)
    expected.loss.backward()
    assert float(found.loss) == pytest.approx(float(expected.loss.detach()), rel=1e-4, abs=1e-5)
    assert found.stop == expected.stop
    assert found.rows == expected.rows
    assert found.metrics.keys() == expected.metrics.keys()
    for mine, param in zip(by_hand, model.parameters(), strict=True):
        torch.testing.assert_close(mine, param.grad, atol=1e-5, rtol=1e-3)


def test_every_entry_is_walked():
    walked = {f"{module.__name__}:{name}" for module, name in FAST_ALGOS.values()}
    assert set(FAST) == walked | {"corral.algos.search.ppo_search:PpoSearch"}
    for entry, (module, _) in zip(FAST.values(), FAST_ALGOS.values(), strict=False):
        assert entry.settings <= {field.name for field in dataclasses.fields(module.Config)}


def test_unknown_field_of_a_batch_selects_the_torch_loss():
    @dataclasses.dataclass
    class Weighted(Minibatch):
        weight: torch.Tensor | None = None

    spec = EnvSpec(OBSERVATIONS["vector"], ACTIONS["discrete"])
    algo = ppo.Ppo(ppo.Config(), spec, 1)
    plain, lean, _ = twins(algo)
    rows, entry = rows_for(algo, plain), find_fast_loss(algo, lean, None)
    assert entry.takes(rows)
    columns = {field.name: getattr(rows, field.name) for field in dataclasses.fields(rows)}
    assert entry.takes(Weighted(**columns))
    assert not entry.takes(Weighted(**columns, weight=torch.ones(len(rows))))


def test_subclass_and_other_network_select_the_torch_loss():
    spec = EnvSpec(OBSERVATIONS["vector"], ACTIONS["discrete"])

    class Mine(ppo.Ppo):
        """May state another loss."""

    class Other(ActorCritic):
        """May have another forward pass."""

    model = ActorCritic(spec, NET)
    FlatParams(model, ppo.Ppo(ppo.Config(), spec, 1).groups())
    assert model.use_numpy()
    assert find_fast_loss(ppo.Ppo(ppo.Config(), spec, 1), model, None) is not None
    assert find_fast_loss(Mine(ppo.Config(), spec, 1), model, None) is None
    other = Other(spec, NET)
    FlatParams(other, ppo.Ppo(ppo.Config(), spec, 1).groups())
    assert other.use_numpy()
    assert find_fast_loss(ppo.Ppo(ppo.Config(), spec, 1), other, None) is None
