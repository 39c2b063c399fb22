"""What Windows tells about the machine, by a Windows that is imitated."""

import ctypes
from types import SimpleNamespace

import pytest

from corral.core import machine, windows

SIZES = {8: 32 << 30, 16: 12 << 30}  # offsets in MEMORYSTATUSEX


def memory_status(status):
    assert ctypes.c_uint32.from_address(ctypes.addressof(status._obj)).value == ctypes.sizeof(status._obj) == 64
    for offset, size in SIZES.items():
        ctypes.c_uint64.from_address(ctypes.addressof(status._obj) + offset).value = size
    return 1


class NoFile:
    """A path at which nothing is."""

    def __init__(self, path):
        pass

    def read_text(self):
        raise FileNotFoundError


@pytest.fixture
def kernel(monkeypatch):
    """Windows' kernel32, and nothing that other systems tell."""
    kernel32 = SimpleNamespace(GlobalMemoryStatusEx=memory_status)
    monkeypatch.setattr(windows.ctypes, "windll", SimpleNamespace(kernel32=kernel32), raising=False)
    monkeypatch.setattr(machine, "os", SimpleNamespace(cpu_count=lambda: 4))
    monkeypatch.setattr(machine, "Path", NoFile)
    return kernel32


def test_memory_is_that_of_the_machine(kernel):
    assert machine.total_bytes() == 32 << 30
    assert machine.available_bytes() == 12 << 30
    kernel.GlobalMemoryStatusEx = lambda status: 0  # it failed
    assert machine.total_bytes() is machine.available_bytes() is None


def test_idle_time_and_own_time_are_free_cores(kernel, monkeypatch):
    times = iter([1.0, 1.5])  # seconds

    def system_times(idle, kernel, user):
        idle._obj.value = int(1e7 * next(times))
        return 1

    kernel.GetSystemTimes = system_times
    clocks = {"monotonic": iter([0.0, 1.0]).__next__, "process_time": iter([0.0, 0.25]).__next__}
    monkeypatch.setattr(machine, "time", SimpleNamespace(**clocks))
    assert machine.CpuMeter().free() == 0.75


@pytest.mark.linux("another system than Windows", hidden=True)
def test_other_systems_have_no_such_functions():
    assert windows.memory_bytes() is windows.idle_s() is None
