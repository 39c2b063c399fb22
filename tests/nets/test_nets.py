"""Networks: encoders of every space, normalisation, memory, and the lean forms that must say the same."""

import warnings

import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers.batches import observe
from helpers.networks import VECTOR, batch_of, randomize, spec_of
from torch import nn

from corral.acting.model_policy import to_tensors
from corral.core.errors import UserError
from corral.core.spaces import Layout
from corral.core.types import tree_map
from corral.nets.actor_critic import ActorCritic
from corral.nets.config import NetConfig
from corral.nets.encoder import Encoder
from corral.nets.numpy_mlp import NumpyMlp
from corral.nets.obs_norm import ObsNorm
from corral.nets.q_network import QNetwork
from corral.nets.recurrent import Core
from corral.nets.torsos import mlp

torch.set_num_threads(1)  # for small networks more only wait for each other


def linears(net):
    return [layer for layer in net.modules() if isinstance(layer, nn.Linear)]


# -- encoders ----------------------------------------------------------------------------------------------------


def encode(space, obs, **config):
    encoder = Encoder(Layout(space), NetConfig(**config))
    out = encoder(to_tensors(obs, torch.device("cpu")))
    assert out.dtype == torch.float32
    assert out.shape[1] == encoder.out_size
    return out.detach().numpy()


def test_discrete_values_become_one_hot_from_their_start():
    np.testing.assert_array_equal(encode(spaces.Discrete(3, start=-1), np.array([-1, 1, 0])), np.eye(3)[[0, 2, 1]])


def test_every_choice_of_a_multi_discrete_becomes_one_hot():
    space = spaces.MultiDiscrete([[2, 3]], start=[[5, -1]])
    got = encode(space, np.array([[[5, 1]], [[6, -1]]]))
    np.testing.assert_array_equal(got, [[1, 0, 0, 0, 1], [0, 1, 1, 0, 0]])


def test_numbers_stay_and_bytes_are_scaled():
    np.testing.assert_array_equal(encode(spaces.MultiBinary(3), np.array([[1, 0, 1]], np.int8)), [[1, 0, 1]])
    np.testing.assert_array_equal(encode(spaces.Box(0, 9, (2,), np.int32), np.array([[7, 9]], np.int32)), [[7, 9]])
    np.testing.assert_allclose(encode(spaces.Box(0, 255, (2,), np.uint8), np.array([[0, 255]], np.uint8)), [[0, 1]])
    np.testing.assert_array_equal(encode(spaces.Box(-1, 1, (), np.float64), np.array([0.5])), [[0.5]])


def test_trees_are_laid_side_by_side_and_every_part_arrives():
    space = spaces.Dict(
        {
            "gear": spaces.Discrete(3),
            "pose": spaces.Tuple((spaces.Box(-1, 1, (2, 2), np.float32), spaces.MultiBinary(2))),
            "speed": spaces.Box(-5, 5, (1,), np.float64),
            "count": spaces.Box(0, 100, (), np.int32),
        }
    )
    encoder = Encoder(Layout(space), NetConfig())
    assert encoder.out_size == 3 + 4 + 2 + 1 + 1
    base = batch_of(space, 1, seed=1)
    first = encode(space, base)
    seen = set()
    layout = Layout(space)
    for i, leaf in enumerate(layout.flatten(base)):
        for position in np.ndindex(leaf.shape):
            changed = [value.copy() for value in layout.flatten(base)]
            changed[i][position] = (leaf[position] + 1) % 2
            columns = np.flatnonzero(encode(space, layout.unflatten(changed))[0] != first[0])
            assert len(columns) > 0
            assert not seen & set(columns)
            seen |= set(columns)
    assert len(seen) >= encoder.out_size - 1


@pytest.mark.parametrize(
    ("shape", "to_chw"),
    [
        ((40, 48), lambda x: x[:, None]),
        ((4, 40, 48), lambda x: x),
        ((3, 40, 48), lambda x: x),
        ((40, 48, 3), lambda x: x.transpose(0, 3, 1, 2)),
        ((40, 48, 1), lambda x: x.transpose(0, 3, 1, 2)),
        ((4, 40, 48, 3), lambda x: x.transpose(0, 1, 4, 2, 3).reshape(len(x), 12, 40, 48)),
    ],
)
def test_images_are_channels_first_and_scaled(shape, to_chw):
    space = spaces.Box(0, 255, shape, np.uint8)
    encoder = Encoder(Layout(space), NetConfig())
    seen = []
    encoder.convs[0].register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    obs = batch_of(space, 2)
    out = encoder(torch.from_numpy(obs))
    assert out.shape == (2, encoder.out_size)
    np.testing.assert_allclose(seen[0].numpy(), to_chw(obs).astype(np.float32) / 255, rtol=1e-6)


def test_images_and_numbers_go_side_by_side():
    space = spaces.Dict({"screen": spaces.Box(0, 255, (40, 40, 3), np.uint8), "speed": VECTOR})
    encoder = Encoder(Layout(space), NetConfig())
    obs = batch_of(space, 2)
    out = encoder(to_tensors(obs, torch.device("cpu"))).detach().numpy()
    np.testing.assert_array_equal(out[:, :3], obs["speed"])
    assert out.shape[1] == 3 + 512


def test_image_as_vector_or_refused_torso():
    space = spaces.Box(0, 255, (40, 40), np.uint8)
    assert encode(space, batch_of(space, 1), encoder="mlp").shape == (1, 1600)
    for name, least in (("nature", 36), ("impala", 16)):
        with pytest.raises(UserError, match=f"encoder={name} needs images of at least {least} x {least}"):
            Encoder(Layout(VECTOR), NetConfig(encoder=name))
    with pytest.raises(UserError, match="at least 36 x 36"):
        Encoder(Layout(spaces.Box(0, 255, (20, 20), np.uint8)), NetConfig(encoder="nature"))
    assert encode(spaces.Box(0, 255, (20, 20), np.uint8), np.zeros((1, 20, 20), np.uint8), encoder="impala").size == 256


# -- normalisation -------------------------------------------------------------------------------------------------


def test_normalisation_moments_are_those_of_all_rows():
    rows = np.random.default_rng(0).normal([3, -50, 0], [1, 1e-3, 40], (1000, 3)).astype(np.float32)
    norm = ObsNorm(3)
    torch.testing.assert_close(norm(torch.ones(1, 3)), torch.ones(1, 3))  # nothing seen yet: as it is
    for part in np.split(rows, [1, 2, 30, 30, 700]):
        norm.merge(norm.moments(torch.from_numpy(part)))
    exact = rows.astype(np.float64)
    np.testing.assert_allclose(norm.mean, exact.mean(0), rtol=1e-12)
    np.testing.assert_allclose(norm.squares / norm.count, exact.var(0), rtol=1e-9)
    expected = np.clip((exact - exact.mean(0)) / np.sqrt(exact.var(0) + 1e-8), -10, 10)
    np.testing.assert_allclose(norm(torch.from_numpy(rows)).numpy(), expected, atol=4e-3)  # float32 of -50 +- 0.001
    np.testing.assert_allclose(norm(torch.from_numpy(rows)).numpy()[:, [0, 2]], expected[:, [0, 2]], atol=1e-5)
    assert norm(torch.full((1, 3), 1e9)).tolist() == [[10.0] * 3]


def test_only_float_leaves_are_normalised():
    space = spaces.Dict({"a": VECTOR, "b": spaces.Discrete(3), "c": spaces.Box(-1, 1, (1,), np.float64)})
    encoder = Encoder(Layout(space), NetConfig(normalize_obs=True))
    obs = batch_of(space, 200)
    observe(encoder, to_tensors(obs, torch.device("cpu")))
    out = encoder(to_tensors(obs, torch.device("cpu"))).numpy()
    np.testing.assert_allclose(out[:, :4].mean(0), 0, atol=1e-6)
    np.testing.assert_allclose(out[:, :4].std(0), 1, atol=1e-6)
    np.testing.assert_array_equal(out[:, 4:], np.eye(3)[obs["b"]])
    other = Encoder(Layout(space), NetConfig(normalize_obs=True))
    other.load_state_dict(encoder.state_dict())
    np.testing.assert_array_equal(other(to_tensors(obs, torch.device("cpu"))).numpy(), out)


# -- heads, and small networks in NumPy -----------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("hidden", [(), (8,), (8, 6), (5, 8, 6)])
def test_numpy_mlp_equals_torch_value_and_gradient(activation, hidden):
    net = randomize(nn.Sequential(mlp(3, hidden, activation), nn.Linear(hidden[-1] if hidden else 3, 4)))
    for param in net.parameters():
        param.grad = torch.ones_like(param)  # gradients are added to
    lean = NumpyMlp(linears(net), activation)
    rows = torch.randn(17, 3, generator=torch.Generator().manual_seed(1)) * 3
    weight = torch.randn(17, 4, generator=torch.Generator().manual_seed(2))
    outputs = lean.forward(rows.numpy())
    lean.backward(rows.numpy(), outputs, weight.numpy())
    got = [param.grad.clone() for param in net.parameters()]
    net.double()
    exact = net(rows.double())
    np.testing.assert_allclose(outputs[-1], exact.detach().numpy(), atol=3e-6, rtol=1e-5)
    found = torch.autograd.grad((exact * weight).sum(), list(net.parameters()))
    for mine, theirs in zip(got, found, strict=True):
        torch.testing.assert_close(mine.double() - 1, theirs, atol=2e-5, rtol=1e-4)


def test_huge_inputs_saturate_and_nothing_warns():
    net = randomize(nn.Sequential(mlp(3, (8,), "tanh"), nn.Linear(8, 2)))
    lean = NumpyMlp(linears(net), "tanh")
    rows = np.array([[1e5, -1e5, 3.0], [-1e30, 1e30, 1e30]], np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = lean.forward(rows)
    np.testing.assert_allclose(np.abs(out[0]), 1.0, atol=3e-7)
    np.testing.assert_allclose(out[-1], net(torch.from_numpy(rows)).detach(), atol=1e-5)


TREE = spaces.Dict({"a": VECTOR, "b": spaces.Discrete(3), "c": spaces.Box(0, 255, (2,), np.uint8)})
OBSERVATIONS = {
    "float32": VECTOR,
    "float64": spaces.Box(-9, 9, (2, 2), np.float64),
    "discrete": spaces.Discrete(3),
    "tree": TREE,
}
NETS = {
    "actor": lambda spec, config: ActorCritic(spec, config),
    "q": lambda spec, config: QNetwork(spec, 4, config, dueling=False),
    "dueling": lambda spec, config: QNetwork(spec, 4, config, dueling=True),
    "dueling, shared": lambda spec, config: QNetwork(spec, 4, config, dueling="shared"),
}
ACTIONS = {
    "discrete": spaces.Discrete(4),
    "box": spaces.Box(-1, 1, (2,), np.float32),
    "hybrid": spaces.Dict({"a": spaces.Discrete(3), "b": spaces.Box(-1, 1, (2,), np.float32)}),
}


def shrink(model):
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.3)
    return model


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("observation", OBSERVATIONS)
@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("hidden", [(), (64, 64)])
def test_numpy_acting_equals_torch(net, observation, activation, normalize, hidden):
    space = OBSERVATIONS[observation]
    config = NetConfig(hidden_sizes=hidden, activation=activation, normalize_obs=normalize)
    model = shrink(randomize(NETS[net](spec_of(space, ACTIONS["hybrid"]), config)))
    assert model.use_numpy()
    obs = batch_of(space, 9)
    tensors = to_tensors(obs, torch.device("cpu"))

    def check():
        torch_says = model(tensors)
        if net == "actor":
            np.testing.assert_allclose(model.numpy_params(obs), torch_says[0].detach(), atol=2e-6, rtol=1e-5)
            with torch.no_grad():
                np.testing.assert_allclose(model.value(tensors), torch_says[1], atol=2e-6, rtol=1e-5)
            acted = model.act(tensors, None, None)[0]
            np.testing.assert_allclose(acted.detach(), torch_says[0].detach(), atol=2e-6, rtol=1e-5)
        else:
            np.testing.assert_allclose(model.numpy_values(obs), torch_says.detach(), atol=2e-6, rtol=1e-5)

    check()
    shrink(randomize(model, seed=3))  # it looks at the weights, and at the statistics, as they are now
    observe(model.encoder, to_tensors(batch_of(space, 50, seed=4), torch.device("cpu")))
    check()


@pytest.mark.parametrize(
    "model",
    [
        ActorCritic(spec_of(), NetConfig(rnn="gru")),
        ActorCritic(spec_of(spaces.Box(0, 255, (40, 40), np.uint8)), NetConfig()),
        QNetwork(spec_of(spaces.Box(0, 255, (40, 40), np.uint8)), 4, NetConfig(), dueling=False),
    ],
)
def test_other_layers_stay_with_torch(model):
    assert not model.use_numpy()


@pytest.mark.parametrize("layer", [nn.LayerNorm(8), nn.Dropout(0.1), nn.ELU()])
def test_unknown_layer_stays_with_torch(layer):
    model = ActorCritic(spec_of(), NetConfig(hidden_sizes=(8, 8)))
    model.policy_torso.insert(1, layer)
    assert not model.use_numpy()
    assert model.numpy_towers is None


def test_policy_and_value_of_a_vector_share_nothing():
    model = randomize(ActorCritic(spec_of(), NetConfig()))
    params, value = model(torch.randn(5, 3))
    of_policy = torch.autograd.grad(params.sum(), list(model.parameters()), allow_unused=True, retain_graph=True)
    of_value = torch.autograd.grad(value.sum(), list(model.parameters()), allow_unused=True)
    assert all((a is None) != (b is None) for a, b in zip(of_policy, of_value, strict=True))


# -- memory ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_numpy_core_equals_torch(kind):
    core = randomize(Core(kind, 3, 5))
    cell = {"lstm": nn.LSTM, "gru": nn.GRU}[kind](3, 5)
    with torch.no_grad():
        cell.weight_ih_l0.copy_(core.inputs.weight)
        cell.weight_hh_l0.copy_(core.hidden.weight)
        cell.bias_ih_l0.copy_(core.inputs.bias)
        cell.bias_hh_l0.copy_(core.hidden.bias)
    x = torch.randn(7, 2, 3)
    out, _ = core(x, core.initial_state(2), torch.zeros(7, 2, dtype=torch.bool))
    torch.testing.assert_close(out, cell(x)[0], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_unroll_equals_stepwise_acting_across_episodes(kind):
    model = randomize(ActorCritic(spec_of(), NetConfig(rnn=kind, rnn_size=6, hidden_sizes=(8,))))
    length, width = 9, 3
    obs = torch.randn(length, width, 3)
    first = torch.rand(length, width, generator=torch.Generator().manual_seed(0)) < 0.3
    start = torch.randn(width, model.core.state_size)
    params, _, states = model.unroll(obs, start, first)
    state = start
    for t in range(length):
        step, state = model.act(obs[t], state, first[t])
        torch.testing.assert_close(step, params[t], atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(state, states[t], atol=1e-6, rtol=1e-6)
    # nothing from before an episode reaches it, and what came before reaches whoever goes on
    other, _, _ = model.unroll(obs, start + 1, first)
    for b in range(width):
        begin = int(first[:, b].int().argmax()) if first[:, b].any() else length
        assert torch.equal(other[begin:, b], params[begin:, b])
        assert begin == 0 or not torch.equal(other[:begin, b], params[:begin, b])


def test_gradients_do_not_flow_across_the_end_of_an_episode():
    model = randomize(ActorCritic(spec_of(), NetConfig(rnn="lstm", rnn_size=6, hidden_sizes=())))
    obs = torch.randn(6, 1, 3, requires_grad=True)
    first = torch.tensor([0, 0, 0, 1, 0, 0], dtype=torch.bool).unsqueeze(-1)
    _, value, _ = model.unroll(obs, torch.zeros(1, 12), first)
    (into,) = torch.autograd.grad(value[5].sum(), obs)
    assert into[:3].abs().max() == 0
    assert (into[3:].abs().amax((1, 2)) > 0).all()


def test_continuous_actions_start_with_the_deviation_asked_for():
    model = ActorCritic(spec_of(action=spaces.Box(-1, 1, (2,), np.float32)), NetConfig(log_std_init=-0.5))
    params, _ = model(torch.randn(4, 3))
    assert params.shape == (4, 4)
    torch.testing.assert_close(params[:, 2:], torch.full((4, 2), -0.5))
    assert params[:, :2].abs().max() < 0.1  # close to the middle


@pytest.mark.parametrize("space", [spaces.Discrete(3), spaces.MultiDiscrete([2, 3]), VECTOR])
@pytest.mark.parametrize("core", ["none", "lstm"])
def test_every_observation_gets_parameters_and_a_value(space, core):
    model = ActorCritic(spec_of(space, ACTIONS["hybrid"]), NetConfig(rnn=core))
    obs = to_tensors(batch_of(space, 6), torch.device("cpu"))
    if core == "none":
        params, value = model(obs)
        assert (params.shape, value.shape) == ((6, model.actions.param_size), (6,))
    else:
        folded = tree_map(lambda leaf: leaf.unflatten(0, (3, 2)), obs)
        params, value, states = model.unroll(folded, model.initial_state(2), torch.zeros(3, 2, dtype=torch.bool))
        assert (params.shape, value.shape) == ((3, 2, model.actions.param_size), (3, 2))
        assert states.shape == (3, 2, 2 * 128)


def test_numpy_network_refuses_rows_of_another_size():
    net = mlp(3, (8,), "tanh")
    with pytest.raises(ValueError, match="of 3 inputs got rows of 5"):
        NumpyMlp(linears(net), "tanh")(np.zeros((2, 5), np.float32))
