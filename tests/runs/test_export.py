"""Exported policies act as the policy does, for every kind of space and network."""

import json

import numpy as np
import pytest
import torch
from gymnasium import spaces

from corral.algos import dqn, ppo
from corral.config.experiment import Experiment
from corral.core.errors import RunFailed, UserError
from corral.core.types import EnvSpec
from corral.nets.config import NetConfig
from corral.runs.export import file as exporting
from corral.runs.export.file import PolicyModule, export
from corral.runs.load import LoadedPolicy
from corral.testing.envs import TreeEnv
from corral.topologies.base import build_model, make_algorithm

VECTOR = spaces.Box(-np.inf, np.inf, (3,), np.float32)


def untrained(observation, action, algo="ppo", **net):
    """A policy whose weights are random enough that its actions depend on what it sees."""
    config = {"ppo": ppo, "dqn": dqn}[algo].Config(net=NetConfig(**net))
    experiment = Experiment(algo=algo, env="none", algorithm=config)
    spec = EnvSpec(observation, action)
    model = build_model(make_algorithm(experiment, spec), 0)
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, value in model.state_dict().items():
        noise = torch.randn(value.shape, generator=generator, dtype=torch.float64)
        noise /= max(1, value[0].numel() if value.dim() > 1 else 1) ** 0.5
        weights[name] = (value + (noise.abs() if "squares" in name or "count" in name else noise)).to(value.dtype)
    meta = {"spec": spec.to_json(), "step": 0, "precision": "fp32", "evaluation": None}
    return LoadedPolicy(experiment, weights, meta, seed=0, device="cpu")


def run_file(path, inputs):
    """The outputs of an exported file, as another program would get them."""
    if path.suffix == ".onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(str(path))
        return dict(zip([o.name for o in session.get_outputs()], session.run(None, inputs), strict=True))
    files = {"corral.json": ""}
    script = torch.jit.load(str(path), _extra_files=files)
    ports = json.loads(files["corral.json"])
    outputs = script(*[torch.from_numpy(inputs[port["name"]]) for port in ports["inputs"]])
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return {port["name"]: value.numpy() for port, value in zip(ports["outputs"], outputs, strict=True)}


SEEN = spaces.Dict(
    {
        "camera": spaces.Box(0, 255, (40, 36, 3), np.uint8),
        "speed": spaces.Box(-50.0, 50.0, (2,), np.float64),
        "gear": spaces.Discrete(4, start=-1),
        "keys": spaces.MultiDiscrete([2, 3], start=[1, 0]),
        "pair": spaces.Tuple((spaces.MultiBinary(2), spaces.Box(0, 9, (), np.int32))),
    }
)
HALF_OPEN = spaces.Box(np.float32([-np.inf, 0, -2, -np.inf]), np.float32([np.inf, np.inf, 6, 3]), dtype=np.float32)
CASES = {
    "discrete": (VECTOR, spaces.Discrete(5, start=2), "ppo", {}),
    "multi_discrete": (VECTOR, spaces.MultiDiscrete([2, 3, 4], start=[0, -1, 5]), "ppo", {"activation": "relu"}),
    "half_open": (VECTOR, HALF_OPEN, "ppo", {"normalize_obs": True}),
    "float64_actions": (VECTOR, spaces.Box(-1e3, 1e3, (2, 2), np.float64), "ppo", {}),
    "hybrid": (TreeEnv().observation_space, TreeEnv().action_space, "ppo", {}),
    "hybrid_lstm": (TreeEnv().observation_space, TreeEnv().action_space, "ppo", {"rnn": "lstm", "rnn_size": 8}),
    "gru": (VECTOR, spaces.Discrete(3), "ppo", {"rnn": "gru", "rnn_size": 8, "normalize_obs": True}),
    "everything_seen": (SEEN, HALF_OPEN, "ppo", {"normalize_obs": True}),
    "impala": (spaces.Box(0, 255, (4, 20, 20), np.uint8), spaces.Discrete(4), "ppo", {"encoder": "impala"}),
    "dqn": (VECTOR, spaces.Discrete(4, start=1), "dqn", {}),
    "dqn_joint": (SEEN, spaces.Tuple((spaces.MultiDiscrete([2, 3], start=[1, 0]), spaces.MultiBinary(2))), "dqn", {}),
}
HEADS = ["discrete", "half_open", "hybrid_lstm", "dqn"]  # of every kind of policy


def files(cases, quick):
    """Each case in each format; ONNX takes seconds, so `make test-slow` has the cases that are not in `quick`."""
    later = [case for case in cases if case not in quick]
    return [(case, "pt") for case in cases] + [
        pytest.param(case, "onnx", marks=pytest.mark.slow if case in later else []) for case in cases
    ]


@pytest.mark.parametrize(("case", "suffix"), files(CASES, quick=HEADS))
def test_a_file_acts_as_the_policy(case, suffix, tmp_path):
    observation, action, algo, net = CASES[case]
    loaded = untrained(observation, action, algo, **net)
    written = export(loaded, tmp_path / f"policy.{suffix}")
    assert written.difference <= 1e-5
    assert written.observations > 100
    assert [path.name for path in tmp_path.iterdir()] == [f"policy.{suffix}"]

    rng = np.random.default_rng(5)
    module = PolicyModule(loaded)
    inputs = exporting._random_inputs(module, loaded, 5, rng)
    outputs = run_file(written.path, dict(zip([port.name for port in written.inputs], inputs, strict=True)))
    assert list(outputs) == [port.name for port in written.outputs]
    leaves = loaded.spec.action.leaves
    obs = loaded.spec.observation.unflatten(inputs[: len(loaded.spec.observation.leaves)])
    state, first = (inputs[-2], inputs[-1]) if loaded.recurrent else (None, np.ones(5, bool))
    wanted, after, _ = loaded.as_policy().act(obs, state, first)
    rows = [outputs[port.name] for port in written.outputs]
    for leaf, got, want in zip(leaves, rows, loaded.spec.action.flatten(wanted), strict=False):
        assert got.shape == (5, *leaf.shape)
        assert got.dtype == (leaf.dtype if leaf.dtype.kind == "f" else np.int64)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-2 if leaf.dtype == np.float64 else 1e-5)
    for row in range(5):
        one = [value[row].astype(leaf.dtype) for leaf, value in zip(leaves, rows, strict=False)]
        assert loaded.spec.action_space.contains(loaded.spec.action.unflatten(one))
    if loaded.recurrent:
        np.testing.assert_allclose(outputs["next_state"], after, atol=1e-5)


def test_inputs_and_outputs_are_named_after_the_spaces(tmp_path):
    loaded = untrained(SEEN, TreeEnv().action_space, rnn="gru", rnn_size=8)
    written = export(loaded, tmp_path / "policy.pt")
    assert [port.name for port in written.inputs] == [
        "obs.camera", "obs.gear", "obs.keys", "obs.pair.0", "obs.pair.1", "obs.speed", "state", "first"
    ]  # fmt: skip
    names = {port.name for port in written.outputs}
    assert names == {"action.gear", "action.move.0", "action.move.1", "action.keys", "next_state"}
    assert str(written.inputs[0]) == "obs.camera uint8 [n, 40, 36, 3]"


@pytest.mark.parametrize(("case", "suffix"), files(["half_open", "multi_discrete", "dqn_joint"], ["multi_discrete"]))
def test_a_file_that_acts_differently_is_not_written(case, suffix, tmp_path):
    observation, action, algo, net = CASES[case]
    loaded = untrained(observation, action, algo, **net)
    other = untrained(observation, action, algo, **net)
    with torch.no_grad():
        for weight in other.model.parameters():
            weight.mul_(1.5).add_(0.1)
    loaded.as_policy = other.as_policy
    with pytest.raises(RunFailed, match="differ from the policy's by"):
        export(loaded, tmp_path / f"policy.{suffix}")
    assert not list(tmp_path.iterdir())


def test_of_two_choices_that_score_the_same_either_is_right():
    head = PolicyModule(untrained(VECTOR, spaces.MultiDiscrete([2, 3]))).head
    scores, best = np.array([[1.0, 1.0, 0.0, 3.0, 2.5]], np.float32), [np.array([[0, 1]])]
    assert head.gap(scores, best, [np.array([[1, 1]])]) == 0.0
    assert head.gap(scores, best, [np.array([[0, 2]])]) == pytest.approx(0.5 / 3)
    assert head.gap(scores, best, [np.array([[0, 3]])]) == float("inf")


def test_mistakes_are_one_line(tmp_path):
    loaded = untrained(VECTOR, spaces.Discrete(2))
    with pytest.raises(UserError, match="must end in"):
        export(loaded, tmp_path / "policy.pkl")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        export(loaded, tmp_path / "file" / "policy.pt")
