"""A device that is not the CPU, for machines without one: its tensors keep their numbers in CPU memory.

Like CUDA it refuses to mix its tensors with those of the CPU and copies from pinned memory without waiting, like MPS
it has no float64, and it records every operation in which the CPU waits for it.
"""

from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("meta")  # the one device type that runs autograd everywhere and is not the CPU
aten = torch.ops.aten
READS = {
    aten._local_scalar_dense.default,  # item(), float(), bool(), tolist()
    aten.equal.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.unique_consecutive.default,
    aten._unique2.default,
}


class DeviceTensor(Tensor):
    """A tensor of the counted device; `host` has its numbers."""

    @staticmethod
    def __new__(cls, host):
        if host.dtype == torch.float64:
            raise TypeError("this device has no float64")
        made = Tensor._make_wrapper_subclass(
            cls, host.size(), host.stride(), host.storage_offset(), dtype=host.dtype, device=DEVICE
        )
        made.host = host
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError("use it within counted_device()")


class _Dispatch(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.waits = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        with self:  # inference mode dispatches composite operations
            out = func.decompose(*args, **kwargs)
        if out is not NotImplemented:
            return out
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        here = [isinstance(leaf, DeviceTensor) for leaf in tensors]
        wanted = kwargs.pop("device", None)
        goes_here = any(here) if wanted is None else torch.device(wanted) == DEVICE
        if func is aten.copy_.default:
            goes_here = here[0]
        if func in (aten._to_copy.default, aten.copy_.default):
            waits = goes_here != here[-1] and not (goes_here and (kwargs.get("non_blocking") or args[2:] == (True,)))
        elif any(here) and not all(ours or not tensor.dim() for ours, tensor in zip(here, tensors, strict=True)):
            raise RuntimeError(f"{func} got tensors of two devices")
        else:
            waits = any(here) and (func in READS or _selects_by_mask(func, args))
        if waits:
            self.waits.append(str(func))
        host_args, host_kwargs = tree_map(lambda x: x.host if isinstance(x, DeviceTensor) else x, (args, kwargs))
        out = func(*host_args, **host_kwargs)
        if not goes_here:
            return out
        known = {id(tensor.host): tensor for tensor in tensors if isinstance(tensor, DeviceTensor)}

        def wrapped(x):
            return x if not isinstance(x, Tensor) else known[id(x)] if id(x) in known else DeviceTensor(x)

        return tree_map(wrapped, out)


def _selects_by_mask(func, args):
    """Whether the size of the result, or the rows to write, depend on the values of a mask."""
    if func not in (aten.index.Tensor, aten.index_put_.default, aten.index_put.default):
        return False
    masks = any(index is not None and index.dtype == torch.bool for index in args[1])
    return masks and (func is aten.index.Tensor or args[2].numel() > 1)


class _Functions(TorchFunctionMode):
    """What is not dispatched, or needs a real device."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is Tensor.pin_memory:
            assert not isinstance(args[0], DeviceTensor), "only tensors of the CPU can be pinned"
            return args[0]
        out = func(*args, **(kwargs or {}))
        if func == Tensor.data.__set__ and isinstance(args[0], DeviceTensor):
            args[0].host = args[1].host
        return out


@contextmanager
def counted_device():
    """Make `DEVICE` usable; gives the list of operations that waited for it."""
    mode = _Dispatch()
    fused = mock.patch("torch.optim.optimizer._get_fused_kernels_supported_devices", return_value=["cpu", "meta"])
    with fused, mode, _Functions():
        yield mode.waits
