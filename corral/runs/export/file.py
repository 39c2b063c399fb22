"""Export of a policy as one file without Corral: ONNX or TorchScript, from raw observations to actions."""

from __future__ import annotations

import contextlib
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces as gs
from torch import Tensor, nn

from corral.core.errors import RunFailed, UserError
from corral.core.log import log_level
from corral.core.spaces import Leaf
from corral.core.types import Array
from corral.nets.actor_critic import ActorCritic
from corral.runs.export.heads import make_head
from corral.runs.folder import atomic_path
from corral.runs.load import LoadedPolicy

TOLERANCE = 1e-5
_SIZES = (1, 7, 64)
_STEPS = 3
_EXTRA = "pip install 'corral-rl[export]'"
_WIDEST = 1e3  # larger bounds do not tell the range of observations

Run = Callable[[list[Array]], list[Array]]


@dataclass(frozen=True)
class Port:
    """One input or output: rows of this shape and dtype."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name} {self.dtype} [{', '.join(['n', *map(str, self.shape)])}]"


@dataclass(frozen=True)
class Exported:
    """A written file, and the largest difference of its actions from the policy's, relative to their scale."""

    path: Path
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    difference: float
    observations: int


class PolicyModule(nn.Module):
    """Maps leaves of observations, and for recurrent policies `state` and `first`, to leaves of the best actions.

    Recurrent policies also return the next `state`. Discrete actions are int64, others have the environment's dtype.
    """

    def __init__(self, loaded: LoadedPolicy):
        super().__init__()
        self._layout, self._recurrent = loaded.spec.observation, loaded.recurrent
        self.model = loaded.model
        self.head = make_head(loaded.algo, loaded.model)
        self.inputs = tuple(_port("obs", leaf, str(leaf.dtype)) for leaf in loaded.spec.observation.leaves)
        self.outputs = tuple(
            _port("action", leaf, str(leaf.dtype) if leaf.dtype.kind == "f" else "int64")
            for leaf in loaded.spec.action.leaves
        )
        self.scales = [_scale(leaf) for leaf in loaded.spec.action.leaves] + [np.ones(())] * self._recurrent
        if self._recurrent:
            size = loaded.alone().initial_state(1).shape[1]
            self.inputs += Port("state", "float32", (size,)), Port("first", "bool", ())
            self.outputs += (Port("next_state", "float32", (size,)),)

    def forward(self, *inputs: Tensor) -> Any:
        """Actions of rows; one tensor, or a tuple if there are several."""
        scores, state = self._scores(inputs)
        results = (*self.head(scores), *([state] if self._recurrent else []))
        return results[0] if len(results) == 1 else results

    @torch.inference_mode()
    def gap(self, inputs: list[Array], some: list[Array], others: list[Array]) -> float:
        """Largest difference in network scores between two sets of actions."""
        scores, _ = self._scores([torch.from_numpy(value) for value in inputs])
        return self.head.gap(scores.numpy(), some, others)

    def _scores(self, inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
        count = len(self._layout.leaves)
        obs = self._layout.unflatten(list(inputs[:count]))
        if not isinstance(self.model, ActorCritic):
            return self.model(obs), None
        state, first = inputs[count:] if self._recurrent else (None, None)
        return self.model.act(obs, state, first)


def export(loaded: LoadedPolicy, path: str | Path) -> Exported:
    """Write the policy as `.onnx` or `.pt` and compare the file with the policy; RunFailed if it differs.

    The batch size is free. A `.pt` is TorchScript with inputs and outputs listed in the extra file `corral.json`; an
    `.onnx` lists them in its graph.
    """
    path = Path(path)
    if path.suffix not in (".onnx", ".pt"):
        raise UserError(f"{path} must end in .onnx or .pt.")
    module = PolicyModule(loaded).eval()
    example = tuple(torch.from_numpy(rows) for rows in _random_inputs(module, loaded, 2, np.random.default_rng(0)))
    write, open_ = (_write_onnx, _open_onnx) if path.suffix == ".onnx" else (_write_torchscript, _open_torchscript)
    with atomic_path(path) as unfinished:
        write(module, example, unfinished)
        difference, count = _compare(module, loaded, open_(unfinished, module))
        if not difference <= TOLERANCE:
            raise RunFailed(
                f"{path} was not written: its actions differ from the policy's by {difference:.1e}, more than "
                f"{TOLERANCE:g}. Try the other format, and please report this."
            )
    return Exported(path, module.inputs, module.outputs, difference, count)


def _compare(module: PolicyModule, loaded: LoadedPolicy, run: Run) -> tuple[float, int]:
    """Largest difference between a file and the policy on random observations, and their number."""
    rng, policy = np.random.default_rng(1), loaded.alone()
    layout, count = loaded.spec.observation, len(loaded.spec.observation.leaves)
    worst, seen = 0.0, 0
    for n in _SIZES:
        state = policy.initial_state(n)
        for _ in range(_STEPS):
            inputs = _random_inputs(module, loaded, n, rng)
            first = np.zeros(n, bool)
            if loaded.recurrent:
                inputs[-2], first = np.asarray(state), inputs[-1]
            action, state, _ = policy.act(layout.unflatten(inputs[:count]), state, first)
            wanted = loaded.spec.action.flatten(action) + ([state] if state is not None else [])
            worst = float(np.maximum(worst, _difference(module, inputs, run(inputs), wanted)))  # NaN stays
            seen += n
    return worst, seen


def _difference(module: PolicyModule, inputs: list[Array], got: list[Array], wanted: list[Array]) -> float:
    worst = 0.0
    for port, scale, a, b in zip(module.outputs, module.scales, got, wanted, strict=True):
        if a.shape != b.shape or str(a.dtype) != port.dtype:
            return float("inf")
        if a.dtype.kind == "f":
            worst = float(np.maximum(worst, (np.abs(a - b) / np.maximum(scale, np.abs(b))).max()))
        elif not np.array_equal(a, b):  # of two choices with equal scores, either is right
            worst = float(np.maximum(worst, module.gap(inputs, got, wanted)))
    return worst


def _write_onnx(module: PolicyModule, example: tuple[Tensor, ...], path: Path) -> None:
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise UserError(f"ONNX needs {error.name}: {_EXTRA}; or export a .pt.") from error
    rows = torch.export.Dim("n")
    with _quiet():
        torch.onnx.export(
            module,
            example,
            str(path),
            input_names=[port.name for port in module.inputs],
            output_names=[port.name for port in module.outputs],
            dynamic_shapes=(tuple({0: rows} for _ in example),),
            dynamo=True,
            external_data=False,
            verbose=False,
        )


def _open_onnx(path: Path, module: PolicyModule) -> Run:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [port.name for port in module.inputs]
    return lambda inputs: list(session.run(None, dict(zip(names, inputs, strict=True))))


def _write_torchscript(module: PolicyModule, example: tuple[Tensor, ...], path: Path) -> None:
    ports = {"inputs": list(map(asdict, module.inputs)), "outputs": list(map(asdict, module.outputs))}
    with _quiet(), torch.no_grad():
        traced = torch.jit.trace(module, example, check_trace=False)  # type: ignore[no-untyped-call]
        torch.jit.save(traced, str(path), _extra_files={"corral.json": json.dumps(ports)})


def _open_torchscript(path: Path, module: PolicyModule) -> Run:
    with _quiet():
        script = torch.jit.load(str(path))  # type: ignore[no-untyped-call]

    def run(inputs: list[Array]) -> list[Array]:
        with torch.inference_mode():
            outputs = script(*map(torch.from_numpy, inputs))
        return [value.numpy() for value in (outputs if isinstance(outputs, tuple) else (outputs,))]

    return run


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the exporters' warnings; `_compare` checks the result."""
    with log_level("torch.onnx", logging.ERROR), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _port(prefix: str, leaf: Leaf, dtype: str) -> Port:
    return Port(f"{prefix}.{leaf.name}" if leaf.path else prefix, dtype, leaf.shape)


def _scale(leaf: Leaf) -> Array:
    """Scale of a difference: half the range of a bounded number, at least 1."""
    low, high = leaf.bounds if leaf.bounds[0] is not None else (np.zeros(()), np.zeros(()))
    with np.errstate(invalid="ignore"):
        half = (np.asarray(high, np.float64) - np.asarray(low, np.float64)) / 2
    scale: Array = np.where(np.isfinite(half), np.maximum(half, 1.0), 1.0)
    return scale


def _random_inputs(module: PolicyModule, loaded: LoadedPolicy, n: int, rng: np.random.Generator) -> list[Array]:
    inputs = [_random_rows(leaf, n, rng) for leaf in loaded.spec.observation.leaves]
    for port in module.inputs[len(inputs) :]:
        rows = rng.standard_normal((n, *port.shape))
        inputs.append(rows > 0 if port.dtype == "bool" else rows.astype(port.dtype))
    return inputs


def _random_rows(leaf: Leaf, n: int, rng: np.random.Generator) -> Array:
    shape = (n, *leaf.shape)
    low, high = leaf.bounds if leaf.bounds[0] is not None else (np.zeros(()), np.full((), 255.0))
    assert low is not None
    assert high is not None
    low, high = np.broadcast_to(low, leaf.shape).astype(float), np.broadcast_to(high, leaf.shape).astype(float)
    if not isinstance(leaf.space, gs.Box) or leaf.dtype.kind != "f":
        least, most = np.clip(low, -_WIDEST, _WIDEST), np.clip(high, -_WIDEST, _WIDEST)
        return rng.integers(least.astype(np.int64), most.astype(np.int64) + 1, shape).astype(leaf.dtype)
    narrow = (np.abs(low) < _WIDEST) & (np.abs(high) < _WIDEST)
    uniform = rng.uniform(np.where(narrow, low, -1), np.where(narrow, high, 1), shape)
    rows = np.where(narrow, uniform, np.clip(rng.standard_normal(shape), low, high))
    return rows.astype(leaf.dtype)
