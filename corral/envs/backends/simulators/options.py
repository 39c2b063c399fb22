"""`make_vec("tcp://HOST:PORT")`: from URLs and options to simulators behind a VecEnv."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from corral.core.errors import UserError
from corral.core.spaces import Layout
from corral.envs.backends.simulators.launcher import Launcher, Recycling
from corral.envs.backends.simulators.vec_env import LinkVecEnv
from corral.envs.supervision import Supervision
from corral.link.address import Address, has_listener, is_local, parse_url
from corral.link.auth import read_token
from corral.link.client.fleet import Fleet
from corral.link.control import Budget
from corral.link.transports.base import Binding
from corral.link.transports.json_values import described
from corral.link.transports.open import open_for_learner


@dataclass(frozen=True)
class LinkOptions:
    """Options of external simulators, given as `env_kwargs`."""

    token_file: str | None = None
    """Simulators must know the token in this file."""
    insecure: bool = False
    """Listen for other machines without a token."""
    reconnect_s: float = 5.0
    """Seconds within which a simulator may reconnect after it lost its connection."""
    sim: str | None = None
    """Command that starts a simulator, with {url} for its address; without it, simulators connect by themselves."""
    sims: int = 1
    """How many of them to start."""
    recycle_episodes: int = 0
    """Replace a simulator that was started here after so many episodes; 0: never."""
    recycle_mb: int = 0
    """Replace one that uses more memory than this; 0: never."""
    snapshot_mb: int = 1024
    """Memory for the states that a planner keeps in one simulator."""
    action: Layout | None = None
    """For zmq+json:// simulators, which have no handshake: a space, a description of one, or n for Discrete(n)."""
    observation: Layout | None = None
    """The same for observations; without it, float32 of the shape of the first observation."""


_KINDS: dict[str, tuple[type, ...]] = {
    "str | None": (str, type(None)), "bool": (bool,), "float": (int, float), "int": (int,),
    "Layout | None": (Layout, type(None)),
}  # fmt: skip


def is_url(env: Any) -> bool:
    """Whether an environment is given as the URL of its simulators."""
    if isinstance(env, str):
        return "://" in env
    return isinstance(env, Sequence) and bool(env) and all(isinstance(each, str) and "://" in each for each in env)


def check_options(url: str, kwargs: Mapping[str, Any]) -> None:
    """UserError when these options are invalid for the URL."""
    for each in url.split(","):
        parse_url(each)
    _read_options(kwargs)


def connect_here(env: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether simulators connect to the process that makes the VecEnv, so that no other process can reach them."""
    urls = (env.split(",") if isinstance(env, str) else list(env)) if is_url(env) else []
    if len(urls) != 1 or kwargs.get("sim") is not None:
        return False
    address = parse_url(urls[0])
    return address.listen_only or (is_local(address) and not has_listener(address))


def share_simulators(kwargs: Mapping[str, Any], parts: int) -> dict[str, Any]:
    """The options of each of `parts` processes of a run, which start the simulators between them."""
    shared = dict(kwargs)
    if shared.get("sim") is not None:
        shared["sims"] = max(1, -(-int(shared.get("sims", 1)) // parts))
    return shared


class _Opened:
    """A fleet, its launcher, and the number of its users."""

    def __init__(self, addresses: tuple[Address, ...], options: LinkOptions):
        token = read_token(options.token_file)
        binding, self.elastic = _open(addresses, token, options)
        budget = Budget(bytes=options.snapshot_mb << 20)
        self.fleet, self.users = Fleet(binding, token, options.reconnect_s, budget), 0
        self._launcher: Launcher | None = None
        if options.sim is not None:
            url = parse_url(binding.urls[0]).to_connect().url
            recycling = Recycling(options.recycle_episodes, options.recycle_mb)
            try:
                self._launcher = Launcher(options.sim, options.sims, url, self.fleet, recycling)
                if token is None and addresses[0].scheme != "zmq+json":  # whose clients need not say who they are
                    self.fleet.admits = self._launcher.started
            except BaseException:
                self.fleet.close()
                raise

    def close(self) -> None:
        self.fleet.close()
        if self._launcher is not None:
            self._launcher.close()


def _open(addresses: tuple[Address, ...], token: bytes | None, options: LinkOptions) -> tuple[Binding, bool]:
    launch = options.sim is not None
    spaces = {what: getattr(options, what) for what in ("action", "observation") if getattr(options, what) is not None}
    if addresses[0].scheme != "zmq+json" and spaces:
        raise UserError(f"env_kwargs {min(spaces)!r} applies to zmq+json:// only: others describe their own spaces.")
    if addresses[0].scheme == "zmq+json" and token is not None:
        raise UserError(
            "Simulators of zmq+json:// cannot prove a token: use zmq://, or insecure=true instead of token_file."
        )
    if launch and len(addresses) > 1:
        raise UserError("--sim needs exactly one URL, the address that its simulators connect to.")
    try:
        return open_for_learner(addresses, token, insecure=options.insecure, must_listen=launch, **spaces)
    except UserError as error:
        if not launch or addresses[0].port == 0 or "Cannot listen" not in str(error):
            raise
        # Another actor of this run has that port; simulators are told where to connect, so any other port works.
        return open_for_learner(
            [addresses[0].with_port(0)], token, insecure=options.insecure, must_listen=True, **spaces
        )


_lock = threading.Lock()
_opened: dict[Any, _Opened] = {}
"""Fleets of this process by their options: two VecEnvs at one address share the simulators there."""


def _take(addresses: tuple[Address, ...], options: LinkOptions) -> tuple[Any, _Opened]:
    key: Any = (addresses, options)
    if options.sim is None and any(address.port == 0 for address in addresses):
        key = object()  # a new port each time
    with _lock:
        if key not in _opened:
            _opened[key] = _Opened(addresses, options)
        _opened[key].users += 1
        return key, _opened[key]


def _release(key: Any) -> None:
    with _lock:
        opened = _opened[key]
        opened.users -= 1
        if opened.users:
            return
        del _opened[key]
    opened.close()


def external_vec_env(
    env: str | Sequence[str],
    num_envs: int,
    simulators: int | None,
    supervision: Supervision,
    role: str,
    env_kwargs: Mapping[str, Any] | None,
    *,
    fewer: bool = False,
) -> LinkVecEnv:
    """A VecEnv over the simulators at these URLs, once that many have joined; by default one, or all of several URLs.

    `fewer`: with fewer free slots than `num_envs`, as many environments as there are slots.
    """
    urls = env.split(",") if isinstance(env, str) else list(env)
    addresses = tuple(parse_url(url) for url in urls)
    options = _read_options(env_kwargs or {})
    key, opened = _take(addresses, options)
    wanted = simulators or (len(addresses) if not opened.elastic else options.sims if options.sim else 1)
    return LinkVecEnv(
        opened.fleet, num_envs, supervision, role,
        simulators=wanted, elastic=opened.elastic, release=partial(_release, key), fewer=fewer,
    )  # fmt: skip


def _read_options(kwargs: Mapping[str, Any]) -> LinkOptions:
    known = {field.name for field in dataclasses.fields(LinkOptions)}
    if odd := [key for key in kwargs if key not in known]:
        raise UserError(f"env_kwargs {odd[0]!r} is not an option of external simulators: {', '.join(sorted(known))}.")
    kwargs = {k: described(v, k) if k in ("action", "observation") and v is not None else v for k, v in kwargs.items()}
    for field in dataclasses.fields(LinkOptions):
        value, expected = kwargs.get(field.name, field.default), _KINDS[str(field.type)]
        if not isinstance(value, expected) or (isinstance(value, bool) and bool not in expected):
            raise UserError(f"env_kwargs {field.name}={value!r} must be of type {field.type}.")
        if isinstance(value, int | float) and value < (1 if field.name == "sims" else 0):
            raise UserError(f"env_kwargs {field.name}={value!r} must be at least {int(field.name == 'sims')}.")
    return LinkOptions(**kwargs)
