"""What a checkpoint holds comes back as it was, of every type, or is refused."""

import tracemalloc

import numpy as np
import pytest
import torch
from helpers.checkpoints import names, same

from corral.core.errors import UserError
from corral.runs.checkpoints.checkpoint import load, save


def round_trip(run, value):
    save(run, {"value": value}, 1, {}, keep=1)
    return load(run)[0]["value"]


TORCH = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


NUMPY = ["?", "u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8"]


@pytest.mark.parametrize("dtype", TORCH, ids=str)
def test_tensors_of_every_dtype_come_back(run, dtype):
    state = [torch.arange(6).reshape(2, 3).to(dtype), torch.ones(()).to(dtype), torch.zeros(0, 3).to(dtype)]
    assert same(round_trip(run, state), state)


@pytest.mark.parametrize("dtype", NUMPY)
def test_arrays_of_every_dtype_come_back(run, dtype):
    state = [np.arange(6).reshape(2, 3).astype(dtype), np.ones((), dtype), np.zeros((0, 3), dtype)]
    assert same(round_trip(run, state), state)


def test_everything_that_is_no_array_comes_back(run):
    state = {
        "floats": [float("nan"), float("inf"), -float("inf"), -0.0, 0.1, 5e-324, 1.7976931348623157e308],
        "ints": [0, -1, 2**200, np.random.default_rng(1).bit_generator.state["state"]["state"]],
        "rest": [None, True, False, "ünï\n", "", [], {}, (), [[1, [2.5, "x"]], []], (1, (2,))],
        "a/b": {"c.d": 1, "~0": 2, "": 3},
        "$float": {"$torch": "x"},
        "by number": {0: {"x": 1}, 1: {"x": 2}, "1": 3, None: 4},
        "numbers": [np.float32(0.1), np.int64(7), np.bool_(True)],
    }
    assert same(round_trip(run, state), state)


def test_keys_with_slashes_and_dots_stay_apart(run):
    state = {
        "a/b": np.array([1]),
        "a": {"b": np.array([2])},
        "a~1b": np.array([3]),
        "x.weight": torch.ones(1),
        "x": {"weight": torch.zeros(1)},
        "d": {1: np.array([4]), "1": np.array([5])},
        "__metadata__": np.array([6]),
    }
    save(run, state, 1, {}, keep=1)
    assert same(load(run)[0], state)


def test_arrays_that_are_not_contiguous_come_back(run):
    base = np.arange(24.0).reshape(4, 6)
    state = [base.T, base[::2, ::-1], np.broadcast_to(np.float32(2), (3, 2)), np.asfortranarray(base)]
    assert all(np.array_equal(a, b) for a, b in zip(round_trip(run, state), state, strict=True))
    tensors = [torch.arange(24.0).reshape(4, 6).t(), torch.ones(1, 3, 4, 4).to(memory_format=torch.channels_last)]
    assert all(torch.equal(a, b) for a, b in zip(round_trip(run, tensors), tensors, strict=True))


def test_big_endian_arrays_keep_their_values(run):
    assert round_trip(run, np.arange(3, dtype=">i4")).tolist() == [0, 1, 2]


def test_parameters_and_optimizer_round_trip(run):
    def make():
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        return model, torch.optim.Adam(model.parameters(), 0.1)

    def step(model, optimizer):
        optimizer.zero_grad()
        model(torch.ones(4, 3)).square().sum().backward()
        optimizer.step()

    model, optimizer = make()
    step(model, optimizer)
    save(run, {"model": dict(model.named_parameters()), "opt": optimizer.state_dict()}, 1, {}, keep=1)
    step(model, optimizer)
    other, other_optimizer = make()
    state, _ = load(run)
    other.load_state_dict(state["model"])
    other_optimizer.load_state_dict(state["opt"])
    step(other, other_optimizer)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_loaded_arrays_are_copies(run, monkeypatch):
    monkeypatch.setattr("corral.runs.checkpoints.state_files._MAPPED", 8)
    save(run, {"small": np.zeros(1, np.uint8), "mapped": np.zeros(64), "torch": torch.zeros(64)}, 1, {}, keep=1)
    state, _ = load(run)
    for value in state.values():
        value[:] = 7
    assert all(float(value.sum()) == 0 for value in load(run)[0].values())


@pytest.mark.linux("files that are removed while they are mapped", hidden=True)
def test_a_mapped_array_outlives_its_checkpoint(run, monkeypatch):
    monkeypatch.setattr("corral.runs.checkpoints.state_files._MAPPED", 8)
    save(run, {"x": np.arange(1000)}, 1, {}, keep=1)
    x = load(run)[0]["x"]
    save(run, {"x": np.zeros(1)}, 2, {}, keep=1)
    assert names(run) == ["latest", "step_000000002"]
    assert x.sum() == 499500


def test_arrays_are_a_safetensors_file(run):
    from safetensors.numpy import load_file
    from safetensors.torch import load_file as load_torch

    state = {"a": {"b": np.arange(3, dtype=np.uint8)}, "c": np.ones((2, 2)), "d": np.zeros((0, 2), np.int16)}
    path = save(run, state, 1, {}, keep=1)
    found = load_file(path / "state.safetensors")
    assert sorted(found) == ["a/b", "c", "d"]
    assert found["a/b"].tolist() == [0, 1, 2]
    assert found["c"].dtype == np.float64
    path = save(run, {"w": torch.ones(3, dtype=torch.bfloat16)}, 2, {}, keep=1)
    assert torch.equal(load_torch(path / "state.safetensors")["w"], torch.ones(3, dtype=torch.bfloat16))


def test_a_state_without_arrays_can_be_saved(run):
    assert same(round_trip(run, 3), 3)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.array([{}, None]), "ndarray of object"),
        (np.array(["x"]), "ndarray of <U1"),
        (np.zeros(2, complex), "ndarray of complex128"),
        (np.zeros(2, [("a", "i4")]), "ndarray of"),
        (object(), "object"),
        ({1, 2}, "set"),
        (b"x", "bytes"),
        (torch.zeros(2, dtype=torch.complex64), "Tensor of torch.complex64"),
        (torch.eye(2).to_sparse(), "Tensor of torch.float32"),
        (lambda: 0, "function"),
    ],
)
def test_value_that_needs_pickle_is_refused(run, value, words):
    with pytest.raises(UserError, match=rf"cannot hold model\.extra, a {words}"):
        save(run, {"model": {"extra": value}}, 1, {}, keep=1)
    save(run, {}, 2, {}, keep=1)
    assert names(run) == ["latest", "step_000000002"]


def test_a_big_array_is_written_without_a_second_copy(run):
    frames = np.zeros((300, 1 << 20), np.uint8)  # 300 MB
    for big in (frames, frames.T, torch.from_numpy(frames)):
        tracemalloc.start()
        save(run, {"frames": big}, 1, {}, keep=1)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 100 << 20
