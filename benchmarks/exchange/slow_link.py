"""Two machines and a slow link between them, emulated by network namespaces and the kernel's token bucket filter."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence

from corral.core.errors import UserError

ADDRESSES = ("198.51.100.1", "198.51.100.2")  # TEST-NET-2: reserved for documentation


class SlowLink:
    """Two namespaces that are removed with the block; `rate` sets the rate between them in either direction."""

    def __init__(self) -> None:
        self._names = [f"corral-{os.getpid()}-{side}" for side in "ab"]
        self._ends = [f"crl{os.getpid() % 10**6}{side}" for side in "ab"]

    def __enter__(self) -> SlowLink:
        if shutil.which("ip") is None or shutil.which("tc") is None:
            raise UserError("This benchmark needs `ip` and `tc`: install iproute2.")
        try:
            for name in self._names:
                _run("ip", "netns", "add", name)
            one, other = self._ends
            _run("ip", "link", "add", one, "netns", self._names[0], "type", "veth", "peer", "name", other, "netns",
                 self._names[1])  # fmt: skip
            for side in (0, 1):
                inside = self.command(side, ())
                _run(*inside, "ip", "addr", "add", f"{ADDRESSES[side]}/30", "dev", self._ends[side])
                _run(*inside, "ip", "link", "set", self._ends[side], "up")
                _run(*inside, "ip", "link", "set", "lo", "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def rate(self, mbit: float) -> None:
        """Set the rate in megabits per second; 0: not throttled."""
        for side in (0, 1):
            device = ("dev", self._ends[side], "root")
            if mbit:
                burst = max(
                    5_000, int(mbit * 1e6 / 8 / 250)
                )  # one tick: a larger burst would send small messages for free
                shape = ("tbf", "rate", f"{mbit}mbit", "burst", str(burst), "latency", "200ms")
                _run(*self.command(side, ("tc", "qdisc", "replace", *device, *shape)))
            else:
                _run(*self.command(side, ("tc", "qdisc", "replace", *device, "pfifo")))

    def command(self, side: int, args: Sequence[str]) -> list[str]:
        """The command that runs `args` on one of the machines."""
        return ["ip", "netns", "exec", self._names[side], *args]

    def __exit__(self, *_: object) -> None:
        for name in self._names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _run(*args: str) -> None:
    done = subprocess.run(args, check=False, capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise UserError(f"Network namespaces cannot be created: {done.stderr.strip()}. Run this benchmark as root.")
