"""Addresses of the link: `tcp://HOST:PORT`, `zmq://HOST:PORT`, `grpc://HOST:PORT`, `zmq+json://HOST:PORT`."""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass, replace

from corral.core.errors import UserError

SCHEMES = ("tcp", "zmq", "grpc", "zmq+json")
_FORM = re.compile(r"([a-z+]+)://(?:(\[[0-9a-fA-F:.%]+\]|\*|[\w.-]*):(\d+))?/?")
_ALL_INTERFACES = {"*", "0.0.0.0", "::"}


@dataclass(frozen=True)
class Address:
    """Where one side listens."""

    scheme: str
    host: str
    port: int

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"

    @property
    def bind_host(self) -> str:
        return "0.0.0.0" if self.host == "*" else self.host

    @property
    def all_interfaces(self) -> bool:
        return self.host in _ALL_INTERFACES

    @property
    def loopback(self) -> bool:
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def listen_only(self) -> bool:
        """Whether the address is only valid for listening (wildcard host or port 0)."""
        return self.all_interfaces or self.port == 0

    def with_port(self, port: int) -> Address:
        return replace(self, port=port)

    def to_connect(self) -> Address:
        """The address at which a process on this machine reaches the listener."""
        return replace(self, host="127.0.0.1") if self.all_interfaces else self


def parse_url(url: str) -> Address:
    """Parse a URL; UserError when it is not a valid address."""
    found = _FORM.fullmatch(url.strip())
    scheme = url.partition("://")[0]
    if scheme not in SCHEMES:
        known = ", ".join(f"{name}://" for name in SCHEMES)
        raise UserError(f"{url!r}: {scheme}:// is not one of {known}.")
    if found is None or (found[3] is not None and int(found[3]) > 65535):
        raise UserError(f"{url!r} is not {scheme}://HOST:PORT, such as {scheme}://127.0.0.1:5555.")
    host, port = (found[2] or "").strip("[]") or "127.0.0.1", int(found[3] or 0)
    return Address(scheme, host, port)


def is_local(address: Address) -> bool:
    """Whether this machine can listen there."""
    if address.all_interfaces or address.loopback:
        return True
    try:
        family, kind, proto, _, where = socket.getaddrinfo(address.host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.bind(where)
    except OSError:
        return False
    return True


def has_listener(address: Address, timeout_s: float = 1.0) -> bool:
    """Whether something accepts connections there now."""
    try:
        with socket.create_connection((address.host, address.port), timeout_s):
            return True
    except OSError:
        return False


def require_safe(address: Address, token: bytes | None, insecure: bool) -> None:
    """UserError when listening there would accept other machines without authentication."""
    if not (address.loopback or token is not None or insecure):
        raise UserError(
            f"{address.url} can be reached from other machines: pass a token file on both sides (`openssl rand -hex 32 "
            "> token`, then --token-file token, or --env-kwargs token_file=token for a learner), listen on 127.0.0.1, "
            "or pass --insecure (a learner: --env-kwargs insecure=true)."
        )
