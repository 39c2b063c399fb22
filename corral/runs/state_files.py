"""A nested state as two files: its arrays in the safetensors format, everything else as JSON. No pickle.

The safetensors library would need the arrays contiguous and a second pass for the hash; here they are written
in pieces that are hashed on the way, so that a replay of many gigabytes needs no second copy of itself.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from corral.errors import UserError
from corral.types import Array

ARRAYS, REST = "state.safetensors", "state.json"
_PIECE = 1 << 24  # bytes that are copied at once
_MAPPED = 1 << 26  # arrays from here on stay in their file until they are touched
# Of each dtype: its name in safetensors, NumPy's type of the same bytes, and torch's.
_DTYPES = (
    ("BOOL", "?", "bool"),
    ("U8", "u1", "uint8"),
    ("I8", "i1", "int8"),
    ("U16", "<u2", "uint16"),
    ("I16", "<i2", "int16"),
    ("F16", "<f2", "float16"),
    ("U32", "<u4", "uint32"),
    ("I32", "<i4", "int32"),
    ("F32", "<f4", "float32"),
    ("U64", "<u8", "uint64"),
    ("I64", "<i8", "int64"),
    ("F64", "<f8", "float64"),
    ("BF16", "<u2", "bfloat16"),
    ("F8_E4M3", "u1", "float8_e4m3fn"),
    ("F8_E5M2", "u1", "float8_e5m2"),
)
_BYTES_OF = {name: np.dtype(code) for name, code, _ in _DTYPES}
_TORCH_OF = {name: torch_name for name, _, torch_name in _DTYPES}
_NAME_OF = {np.dtype(code): name for name, code, torch_name in reversed(_DTYPES)}
_NAME_OF_TORCH = {f"torch.{torch_name}": name for name, _, torch_name in _DTYPES}


def write_state(folder: Path, state: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Write both files and wait for the disk; gives each file's size and sha256.

    Leaves are NumPy arrays and numbers, torch tensors, int, float, str, bool and None; nodes are dicts, lists and
    tuples. All of them come back as they were, tensors on the CPU.
    """
    arrays: dict[str, Any] = {}
    rest = json.dumps(encode(state, arrays), allow_nan=False).encode()
    return {ARRAYS: _write_file(folder / ARRAYS, _pieces(arrays)), REST: _write_file(folder / REST, iter([rest]))}


def read_state(folder: Path) -> dict[str, Any]:
    """The state that `write_state` wrote; arrays of 64 MB and more are mapped copy-on-write from the file."""
    with open(folder / ARRAYS, "rb") as file:
        arrays = _read_arrays(file)
    state: dict[str, Any] = decode(json.loads((folder / REST).read_bytes()), arrays)
    return state


def file_facts(path: Path) -> dict[str, Any]:
    """Size and sha256 of a file, in the form that `write_state` gives."""
    sha = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            sha.update(piece)
        return {"size": file.tell(), "sha256": sha.hexdigest()}


def encode(node: Any, arrays: dict[str, Any] | None, path: tuple[str, ...] = ()) -> Any:
    """The JSON of a tree; its arrays go to `arrays` under their path. With None, arrays are refused.

    What JSON has no word for is a dict of one key with a dollar sign, so that every tree comes back as it was.
    """
    if node is None or isinstance(node, bool | str):
        return node
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
        raise UserError(
            f"A checkpoint cannot hold {'.'.join(path) or 'its state'}, a {_describe(node)}: give arrays, tensors, "
            "numbers, strings, or dicts and lists of them in state_dict()."
        )
    name = "/".join(key.replace("~", "~0").replace("/", "~1") for key in path)
    while name in arrays or name == "__metadata__":  # 1 and "1" are different keys; the other is the format's own
        name += "~2"
    arrays[name] = node
    return {f"${kind}": name}


def decode(node: Any, arrays: dict[str, tuple[str, Array]]) -> Any:
    """The tree that `encode` was given."""
    if isinstance(node, list):
        return [decode(item, arrays) for item in node]
    if not isinstance(node, dict):
        return node
    word = next(iter(node), "")
    if not word.startswith("$"):
        return {key: decode(value, arrays) for key, value in node.items()}
    value = node[word]
    if word == "$float":
        return float(value)
    if word == "$tuple":
        return tuple(decode(item, arrays) for item in value)
    if word == "$pairs":
        return {decode(key, arrays): decode(item, arrays) for key, item in value}
    dtype, array = arrays[value]
    if word == "$torch":
        return _to_torch(dtype, array)
    return array[()] if word == "$number" else array


def _kind(node: Any) -> str | None:
    if isinstance(node, np.ndarray | np.generic):
        known = node.dtype.newbyteorder("<") in _NAME_OF
        return ("number" if isinstance(node, np.generic) else "numpy") if known else None
    if type(node).__module__.partition(".")[0] == "torch" and hasattr(node, "dtype"):
        return "torch" if str(node.dtype) in _NAME_OF_TORCH and str(node.layout) == "torch.strided" else None
    return None


def _describe(node: Any) -> str:
    kind = type(node).__name__
    return f"{kind} of {node.dtype}" if hasattr(node, "dtype") else kind


def _bytes_of(array: Any) -> tuple[str, Array]:
    """The safetensors name of an array's dtype, and the array with NumPy's type of the same bytes."""
    if isinstance(array, np.ndarray | np.generic):
        plain = np.asarray(array)
        little = plain.dtype.newbyteorder("<")
        return _NAME_OF[little], plain.astype(little, copy=False)
    import torch

    name = _NAME_OF_TORCH[str(array.dtype)]
    tensor = array.detach().cpu()
    if name in ("BF16", "F8_E4M3", "F8_E5M2"):
        tensor = tensor.view(torch.int16 if name == "BF16" else torch.uint8)
    result: Array = tensor.numpy()
    return name, result


def _pieces(arrays: dict[str, Any]) -> Iterator[bytes | memoryview]:
    """A safetensors file in pieces: the length of the header, the header, the bytes of every array in turn."""
    header: dict[str, Any] = {}
    offset = 0
    facts = {name: _facts(array) for name, array in arrays.items()}
    # The widest first, so that every array is aligned.
    order = sorted(arrays, key=lambda name: -_BYTES_OF[facts[name][0]].itemsize)
    for name in order:
        dtype, shape = facts[name]
        end = offset + math.prod(shape) * _BYTES_OF[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text))
    yield text
    for name in order:
        yield from _slices(_bytes_of(arrays[name])[1])


def _facts(array: Any) -> tuple[str, list[int]]:
    if isinstance(array, np.ndarray | np.generic):
        return _NAME_OF[array.dtype.newbyteorder("<")], list(array.shape)
    return _NAME_OF_TORCH[str(array.dtype)], list(array.shape)


def _slices(array: Array) -> Iterator[memoryview]:
    if not array.size:
        return
    rows = array if array.ndim else array.reshape(1)
    step = max(1, _PIECE * len(rows) // array.nbytes)
    for start in range(0, len(rows), step):
        yield np.ascontiguousarray(rows[start : start + step]).data.cast("B")


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


def _to_torch(dtype: str, array: Array) -> Any:
    import torch

    tensor = torch.from_numpy(array)
    return tensor.view(getattr(torch, _TORCH_OF[dtype])) if dtype in ("BF16", "F8_E4M3", "F8_E5M2") else tensor
