"""`make_vec("tcp://HOST:PORT")`: from URLs and options to simulators behind a VecEnv."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from corral.envs.link_vec import LinkVecEnv
from corral.envs.supervise import Supervision
from corral.errors import UserError
from corral.link.address import Address, parse_url
from corral.link.fleet import Fleet
from corral.link.opening import open_for_learner
from corral.link.proofs import read_token


@dataclass(frozen=True)
class LinkOptions:
    """What `env_kwargs` may say about external simulators."""

    token_file: str | None = None
    """Simulators must know the token in this file."""
    insecure: bool = False
    """Listen for other machines without a token."""
    reconnect_s: float = 5.0
    """How long a simulator whose connection is lost may take to come back."""


def is_url(env: Any) -> bool:
    """Whether an environment is named by where its simulators are."""
    if isinstance(env, str):
        return "://" in env
    return isinstance(env, Sequence) and bool(env) and all(isinstance(each, str) and "://" in each for each in env)


class _Shared:
    """Fleets of this process by what they were opened with: two VecEnvs at one address share the simulators there."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fleets: dict[Any, tuple[Fleet, bool, int]] = {}

    def take(self, addresses: tuple[Address, ...], options: LinkOptions) -> tuple[Any, Fleet, bool]:
        """A fleet, opened by the first who wants it, and whether more simulators may come to it."""
        key: Any = (addresses, options)
        with self._lock:
            if any(address.port == 0 for address in addresses):
                key = object()  # a port of its own each time
            if key not in self._fleets:
                token = read_token(options.token_file)
                binding, elastic = open_for_learner(addresses, token, insecure=options.insecure)
                self._fleets[key] = Fleet(binding, token, options.reconnect_s), elastic, 0
            fleet, elastic, users = self._fleets[key]
            self._fleets[key] = fleet, elastic, users + 1
            return key, fleet, elastic

    def release(self, key: Any) -> None:
        """The last one closes it."""
        with self._lock:
            fleet, elastic, users = self._fleets[key]
            if users > 1:
                self._fleets[key] = fleet, elastic, users - 1
                return
            del self._fleets[key]
        fleet.close()


_shared = _Shared()


def external_vec_env(
    env: str | Sequence[str],
    num_envs: int,
    simulators: int | None,
    supervision: Supervision,
    role: str,
    env_kwargs: Mapping[str, Any] | None,
) -> LinkVecEnv:
    """A VecEnv over the simulators at these URLs; `simulators` of them are waited for, by default one or all dialled."""
    urls = env.split(",") if isinstance(env, str) else list(env)
    addresses = tuple(parse_url(url) for url in urls)
    options = _read_options(env_kwargs or {})
    key, fleet, elastic = _shared.take(addresses, options)
    wanted = simulators or (1 if elastic else len(addresses))
    return LinkVecEnv(
        fleet, num_envs, supervision, role, simulators=wanted, elastic=elastic, release=lambda: _shared.release(key)
    )


def _read_options(kwargs: Mapping[str, Any]) -> LinkOptions:
    known = {field.name for field in dataclasses.fields(LinkOptions)}
    if odd := [key for key in kwargs if key not in known]:
        raise UserError(f"env_kwargs {odd[0]!r} is not an option of external simulators: {', '.join(sorted(known))}.")
    try:
        return LinkOptions(**kwargs)
    except TypeError as error:
        raise UserError(f"env_kwargs of external simulators: {error}.") from error
