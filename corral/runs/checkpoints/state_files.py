"""A nested state as pairs of files: arrays in the safetensors format, everything else as JSON. No pickle.

Branches may have their own pair of files, so that one can be read or removed without the others. The safetensors
library needs contiguous arrays and a second pass for the hash; here arrays are written and hashed in pieces, so that a
replay buffer of many gigabytes needs no second copy.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from corral.core.errors import UserError
from corral.core.types import Array

_MAIN = "state"
_PIECE = 1 << 24  # bytes copied at once
_MAPPED = 1 << 26  # larger arrays are mapped from their file
_DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "F16": "float16", "U32": "uint32",
    "I32": "int32", "F32": "float32", "U64": "uint64", "I64": "int64", "F64": "float64", "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
}  # fmt: skip
"""Name in safetensors -> name in torch, and in NumPy if it has the type."""
_ONLY_TORCH = {"BF16": "uint16", "F8_E4M3": "uint8", "F8_E5M2": "uint8"}
"""Types that NumPy lacks -> one of the same bytes."""
_BYTES_OF = {name: np.dtype(_ONLY_TORCH.get(name, kind)).newbyteorder("<") for name, kind in _DTYPES.items()}
_NAME_OF = {np.dtype(kind): name for name, kind in _DTYPES.items() if name not in _ONLY_TORCH}
_NAME_OF_TORCH = {f"torch.{kind}": name for name, kind in _DTYPES.items()}


@dataclass(frozen=True)
class _SeparateFiles:
    """Placeholder of a branch with its own files."""

    name: str


def write_state(
    folder: Path, state: dict[str, Any], separate: Mapping[str, tuple[str, ...]] | None = None
) -> dict[str, dict[str, Any]]:
    """Write the files and sync them to disk; returns each file's size and sha256.

    Leaves are NumPy arrays and numbers, torch tensors, int, float, str, bool and None; nodes are dicts, lists and
    tuples. All of them come back unchanged, tensors on the CPU. `separate` names branches, by their path of keys,
    that get their own files unless they are missing or None.
    """
    facts: dict[str, dict[str, Any]] = {}
    for name, keys in (separate or {}).items():
        branch = branch_of(state, keys)
        if branch is not None:
            facts |= _write_pair(folder, name, branch)
            state = _replaced(state, keys, _SeparateFiles(name))
    return facts | _write_pair(folder, _MAIN, state)


def read_state(folder: Path, files: Mapping[str, Any]) -> dict[str, Any]:
    """The state that `write_state` wrote, None for branches not in `files`; arrays from 64 MB on are mapped."""

    def branch(name: str) -> Any:
        return read_branch(folder, name) if files_of(name)[0] in files else None

    state: dict[str, Any] = read_branch(folder, _MAIN, branch)
    return state


def read_branch(folder: Path, name: str, branch: Callable[[str], Any] = lambda name: None) -> Any:
    """Read a branch that has its own files."""
    arrays, rest = files_of(name)
    with open(folder / arrays, "rb") as file:
        return decode(json.loads((folder / rest).read_bytes()), _read_arrays(file), branch)


def files_of(name: str) -> tuple[str, str]:
    """The two files of a branch."""
    return f"{name}.safetensors", f"{name}.json"


def branch_of(state: Any, keys: tuple[str, ...]) -> Any:
    """The value at this path of keys, or None."""
    for key in keys:
        state = state.get(key) if isinstance(state, dict) else None
    return state


def size_and_hash(path: Path) -> dict[str, Any]:
    """Size and sha256 of a file, as `write_state` returns them."""
    sha = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            sha.update(piece)
        return {"size": file.tell(), "sha256": sha.hexdigest()}


def encode(node: Any, arrays: dict[str, Any] | None, path: tuple[str, ...] = ()) -> Any:
    """The JSON of a tree; its arrays go to `arrays` under their path. With None, arrays are refused.

    Values that JSON lacks become a dict with one key that starts with a dollar sign, to restore trees exactly.
    """
    if node is None or isinstance(node, bool | str):
        return node
    if isinstance(node, _SeparateFiles):
        return {"$apart": node.name}
    if isinstance(node, float):
        return float(node) if math.isfinite(node) else {"$float": repr(float(node))}
    if isinstance(node, int):
        return int(node)
    if isinstance(node, list | tuple):
        items = [encode(item, arrays, (*path, str(i))) for i, item in enumerate(node)]
        return items if isinstance(node, list) else {"$tuple": items}
    if isinstance(node, dict):
        pairs = [(key, encode(value, arrays, (*path, str(key)))) for key, value in node.items()]
        if all(isinstance(key, str) and not key.startswith("$") for key, _ in pairs):
            return dict(pairs)
        return {"$pairs": [[encode(key, None, path), value] for key, value in pairs]}
    kind = _kind(node)
    if kind is None or arrays is None:
        dtype = f" of {node.dtype}" if hasattr(node, "dtype") else ""
        raise UserError(
            f"A checkpoint cannot hold {'.'.join(path) or 'its state'}, a {type(node).__name__}{dtype}: give arrays, "
            "tensors, numbers, strings, or dicts and lists of them in state_dict()."
        )
    name = "/".join(key.replace("~", "~0").replace("/", "~1") for key in path)
    while name in arrays or name == "__metadata__":  # 1 and "1" are different keys; the format reserves the other
        name += "~2"
    arrays[name] = node
    return {f"${kind}": name}


def decode(node: Any, arrays: dict[str, tuple[str, Array]], branch: Callable[[str], Any] = lambda name: None) -> Any:
    """The tree that `encode` was given; `branch` returns branches with their own files."""

    def inner(value: Any) -> Any:
        return decode(value, arrays, branch)

    if isinstance(node, list):
        return [inner(item) for item in node]
    if not isinstance(node, dict):
        return node
    word = next(iter(node), "")
    if not word.startswith("$"):
        return {key: inner(value) for key, value in node.items()}
    value = node[word]
    if word == "$apart":
        return branch(value)
    if word == "$float":
        return float(value)
    if word == "$tuple":
        return tuple(inner(item) for item in value)
    if word == "$pairs":
        return {inner(key): inner(item) for key, item in value}
    dtype, array = arrays[value]
    if word == "$torch":
        import torch

        tensor = torch.from_numpy(array)
        return tensor.view(getattr(torch, _DTYPES[dtype])) if dtype in _ONLY_TORCH else tensor
    return array[()] if word == "$number" else array


def _kind(node: Any) -> str | None:
    """How a checkpoint holds it; None if it cannot."""
    if _dtype_name(node) is None or str(getattr(node, "layout", "torch.strided")) != "torch.strided":
        return None
    return "number" if isinstance(node, np.generic) else "numpy" if isinstance(node, np.ndarray) else "torch"


def _dtype_name(array: Any) -> str | None:
    """The safetensors name of the dtype of an array or tensor; None if it has none."""
    if isinstance(array, np.ndarray | np.generic):
        return _NAME_OF.get(array.dtype.newbyteorder("<"))
    return _NAME_OF_TORCH.get(str(getattr(array, "dtype", None)))


def _bytes_of(array: Any, dtype: str) -> Array:
    """The array with NumPy's type of the same bytes."""
    if isinstance(array, np.ndarray | np.generic):
        return np.asarray(array).astype(array.dtype.newbyteorder("<"), copy=False)
    import torch

    tensor = array.detach().cpu()
    if dtype in _ONLY_TORCH:
        tensor = tensor.view(getattr(torch, _ONLY_TORCH[dtype]))
    result: Array = tensor.numpy()
    return result


def _pieces(arrays: dict[str, Any]) -> Iterator[bytes | memoryview]:
    """A safetensors file in pieces: length of the header, header, bytes of every array."""
    header: dict[str, Any] = {}
    offset = 0
    dtypes = {name: str(_dtype_name(array)) for name, array in arrays.items()}
    # The widest first, so that every array is aligned.
    order = sorted(arrays, key=lambda name: -_BYTES_OF[dtypes[name]].itemsize)
    for name in order:
        shape = list(arrays[name].shape)
        end = offset + math.prod(shape) * _BYTES_OF[dtypes[name]].itemsize
        header[name] = {"dtype": dtypes[name], "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text))
    yield text
    for name in order:
        yield from _slices(_bytes_of(arrays[name], dtypes[name]))


def _slices(array: Array) -> Iterator[memoryview]:
    if not array.size:
        return
    rows = array if array.ndim else array.reshape(1)
    step = max(1, _PIECE * len(rows) // array.nbytes)
    for start in range(0, len(rows), step):
        yield np.ascontiguousarray(rows[start : start + step]).data.cast("B")


def _replaced(node: dict[str, Any], keys: tuple[str, ...], value: Any) -> dict[str, Any]:
    """A copy of the dicts along this path of keys, with another value at its end."""
    inner = _replaced(node[keys[0]], keys[1:], value) if len(keys) > 1 else value
    return {**node, keys[0]: inner}


def _write_pair(folder: Path, name: str, state: Any) -> dict[str, dict[str, Any]]:
    arrays: dict[str, Any] = {}
    text = json.dumps(encode(state, arrays), allow_nan=False).encode()
    pieces = (_pieces(arrays), iter([text]))
    return {file: _write_file(folder / file, content) for file, content in zip(files_of(name), pieces, strict=True)}


def _write_file(path: Path, pieces: Iterator[bytes | memoryview]) -> dict[str, Any]:
    sha = hashlib.sha256()
    with open(path, "wb") as file:
        for piece in pieces:
            file.write(piece)
            sha.update(piece)
        file.flush()
        os.fsync(file.fileno())
        return {"size": file.tell(), "sha256": sha.hexdigest()}


def _read_arrays(file: BinaryIO) -> dict[str, tuple[str, Array]]:
    (length,) = struct.unpack("<Q", file.read(8))
    header: dict[str, Any] = json.loads(file.read(length))
    header.pop("__metadata__", None)
    mapped = np.memmap(file, np.uint8, mode="c").view(np.ndarray)[8 + length :]
    arrays: dict[str, tuple[str, Array]] = {}
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        dtype = _BYTES_OF[entry["dtype"]]
        array = mapped[start:end].view(dtype).reshape(entry["shape"])
        arrays[name] = entry["dtype"], array if array.nbytes >= _MAPPED else array.copy()
    return arrays
