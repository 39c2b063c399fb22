"""Bookkeeping of a backend: which environments are in flight, and which results are ready."""

from __future__ import annotations

from corral.core.errors import UserError
from corral.core.types import Array, EnvSpec, Tree
from corral.envs.stepping.id_set import IdSet, IdSets


class InFlight:
    """State of every environment: idle, in flight, or ready to be received, as masks (see `id_set`)."""

    def __init__(self, num_envs: int, spec: EnvSpec):
        self.num_envs, self.spec = num_envs, spec
        self.sets = IdSets(num_envs)
        self.all_envs = self.sets.all_envs
        self.in_flight = self.ready = 0
        self.started = self.closed = False

    def start(self) -> None:
        self.require_open()
        self.in_flight, self.ready = self.all_envs.mask, 0
        self.started = True

    def require_open(self) -> None:
        if self.closed:
            raise UserError("This VecEnv is closed; make a new one with corral.make_vec.")

    def require_idle(self) -> None:
        self.require_open()
        if not self.started or self.in_flight | self.ready:
            raise UserError("state_dict() needs all environments idle: recv() the results in flight first.")

    def begin(self, env_ids: Array) -> IdSet:
        """Check and record that new episodes begin in these environments."""
        self.require_none_waiting("A reset")
        chosen = self.sets.of(env_ids)
        if not self.started and len(chosen) < self.num_envs:
            raise UserError("The first reset must be of all environments: call reset() first.")
        self.started = True
        self.in_flight |= chosen.mask
        return chosen

    def require_none_waiting(self, what: str) -> None:
        self.require_open()
        if self.in_flight | self.ready:
            raise UserError(f"{what} needs all environments idle: recv() the results in flight first.")

    def require_new(self) -> None:
        self.require_open()
        if self.started:
            raise UserError("load_state_dict() needs environments that have just been made: make a new VecEnv.")

    def send(self, env_ids: Array, actions: Tree) -> tuple[IdSet, list[Array]]:
        """Check and record a send; returns the id set and the action leaves."""
        if not self.started or self.closed:
            self.require_open()
            raise UserError("Call recv() before the first send(): it returns the first observations.")
        chosen = self.sets.of(env_ids)
        if waiting := (self.in_flight | self.ready) & chosen.mask:
            first = [i for i in chosen.numbers if waiting >> i & 1][:16]
            raise UserError(f"Environments {first} have a result waiting; recv() it before sending again.")
        leaves = self.spec.action.batch(actions, len(chosen.numbers))
        self.in_flight |= chosen.mask
        return chosen, leaves

    def wanted(self, min_ready: int | None, env_ids: Array | None) -> tuple[IdSet | None, int]:
        """The environments a recv waits for (None: any), and how many of them."""
        if self.closed:
            self.require_open()
        pending = self.in_flight | self.ready
        if env_ids is not None:
            chosen = self.sets.of(env_ids)
            if pending & chosen.mask != chosen.mask:
                raise UserError(f"recv(env_ids) names idle environments: {chosen.numbers[:16]}; send() first.")
            return chosen, len(chosen)
        if not pending:
            raise UserError("recv() has nothing to wait for: send() actions first.")
        count = pending.bit_count()
        if min_ready is None:
            return None, count
        if min_ready < 1:
            raise UserError(f"min_ready must be at least 1, got {min_ready}.")
        return None, min(min_ready, count)

    def complete(self, mask: int) -> None:
        self.in_flight &= ~mask
        self.ready |= mask

    def num_ready(self, chosen: IdSet | None) -> int:
        return (self.ready if chosen is None else self.ready & chosen.mask).bit_count()

    def take(self, chosen: IdSet | None) -> IdSet:
        if chosen is None:
            chosen = self.sets.of_mask(self.ready)
        self.ready &= ~chosen.mask
        return chosen

    def is_in_flight(self, ids: Array) -> Array:
        flags: Array = self.sets.bools(self.in_flight)[ids]
        return flags
