"""Open a binding from URLs: which side listens and which connects."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from typing import Any

from corral.core.errors import UserError
from corral.link.address import Address, has_listener, is_local, require_safe
from corral.link.transports.base import Binding

log = logging.getLogger("corral.link")

_MODULES = {
    "tcp": ("corral.link.transports.tcp", "TcpBinding"),
    "zmq": ("corral.link.transports.zmq", "ZmqBinding"),
    "zmq+json": ("corral.link.transports.json_router", "JsonBinding"),
    "grpc": ("corral.link.transports.grpc", "GrpcBinding"),
}


def open_binding(
    scheme: str, *, listen: Address | None = None, connect: Sequence[Address] = (), **spaces: Any
) -> Binding:
    """Listen at one address or connect to several; `spaces` are those that the learner knows, for zmq+json alone."""
    module, name = _MODULES[scheme]
    binding: Binding = getattr(importlib.import_module(module), name)(listen=listen, connect=connect, **spaces)
    binding.listens = listen is not None
    return binding


def open_for_learner(
    addresses: Sequence[Address],
    token: bytes | None,
    *,
    insecure: bool = False,
    must_listen: bool = False,
    **spaces: Any,
) -> tuple[Binding, bool]:
    """Connect where simulators listen, else listen; also returns whether more simulators may join later."""
    schemes = {address.scheme for address in addresses}
    if len(schemes) != 1:
        raise UserError(f"Simulators over {' and '.join(sorted(schemes))} cannot be mixed: use one scheme for all.")
    (scheme,) = schemes
    first = addresses[0]
    listens = len(addresses) == 1 and (
        must_listen or first.listen_only or (is_local(first) and not has_listener(first))
    )
    if not listens:
        if odd := [address.url for address in addresses if address.listen_only]:
            raise UserError(f"{odd[0]} cannot be connected to: among several addresses each needs a host and a port.")
        return open_binding(scheme, connect=addresses, **spaces), False
    require_safe(first, token, insecure)
    return _listen_or_connect(first, "simulators", must_listen, **spaces)


def open_for_simulator(address: Address, token: bytes | None, *, bind: bool, insecure: bool = False) -> Binding:
    """Listen or connect; if told to listen where a learner already does, connect to it."""
    if not bind:
        if address.listen_only:
            raise UserError(f"{address.url} cannot be connected to: name the learner's host and port.")
        return open_binding(address.scheme, connect=[address])
    require_safe(address, token, insecure)
    if not address.listen_only and has_listener(address):
        log.info("a process already listens at %s; connecting to it.", address.url)
        return open_binding(address.scheme, connect=[address])
    return _listen_or_connect(address, "learners")[0]


def _listen_or_connect(address: Address, peer_kind: str, must: bool = False, **spaces: Any) -> tuple[Binding, bool]:
    """Listen; or connect to a process that has started to listen there meanwhile, and log it."""
    try:
        binding = open_binding(address.scheme, listen=address, **spaces)
    except UserError:
        if must or address.listen_only or not has_listener(address):
            raise
        log.info("a process already listens at %s; connecting to it.", address.url)
        return open_binding(address.scheme, connect=[address], **spaces), False
    log.info("listening for %s at %s.", peer_kind, ", ".join(binding.urls))
    return binding, True
