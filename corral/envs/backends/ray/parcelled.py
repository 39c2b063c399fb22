"""Environments in workers that share no memory with the caller: rows are kept here, and travel as parcels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic

from corral.core.types import Array
from corral.envs.backends.remote.vec_env import RemoteVecEnv, W
from corral.envs.stepping.id_set import IdSet
from corral.envs.stepping.rows import Rows
from corral.envs.supervision import IDLE as NO_ENV


class ParcelledVecEnv(RemoteVecEnv[W], Generic[W]):
    """What the Ray and the gRPC backend have in common."""

    def _make_rows(self) -> Rows:
        rows = Rows(self.spec, self.num_envs)
        rows.mark[:] = NO_ENV  # who is being stepped is known elsewhere
        return rows

    def _shares(self, chosen: IdSet) -> Iterator[tuple[W, Array]]:
        """The workers of these environments, each with its own, which it owes results of from now on."""
        owner = self._worker_of[chosen.ids]
        for worker in self._workers:
            mine = chosen.ids[owner == worker.index]
            if not len(mine):
                continue
            if worker.pending == 0:
                worker.touch()
            worker.pending += len(mine)
            yield worker, mine
