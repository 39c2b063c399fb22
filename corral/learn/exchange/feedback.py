"""What a codec leaves out is not lost: it is added to the next gradient.

Error feedback (Seide et al. 2014): `e <- e + g`, send `C(e)`, `e <- e - C(e)`. With momentum correction (Lin et al.
2018) velocities are gathered instead of gradients: `u <- m u + g`, `e <- e + u`, and where something was sent `u`
starts anew, so that what waits does not push on with a direction of long ago.
"""

from __future__ import annotations

import numpy as np

from corral.core.types import Array
from corral.learn.exchange.codecs import Codec


class Compression:
    """One learner's gradients, as codes of the same size each."""

    def __init__(self, codec: Codec, count: int, seed: int, *, feedback: bool, momentum: float = 0.0):
        self._codec, self.count, self._feedback, self._momentum = codec, count, feedback, momentum
        self._rng = np.random.default_rng(seed)
        self._left = np.zeros(count if feedback else 0, np.float32)
        self._velocity = np.zeros(count if momentum else 0, np.float32)
        self._ended = self._velocity  # velocities that ended with the last code

    @property
    def size(self) -> int:
        """Bytes of a code."""
        return self._codec.size(self.count)

    def pack(self, grad: Array) -> Array:
        """The code of a finite gradient, and of what was left of earlier ones."""
        if not self._feedback:
            return self._codec.encode(grad, self._rng)
        if self._momentum:
            self._velocity *= np.float32(self._momentum)
            self._velocity += grad
            grad = self._velocity
        self._left += grad
        code = self._codec.encode(self._left, self._rng)
        sent = self._codec.decode(code, self.count)
        self._left -= sent
        if self._momentum:
            self._ended = np.where(sent != 0, self._velocity, np.float32(0.0))
            self._velocity -= self._ended
        return code

    def unpack(self, code: Array) -> Array:
        """The gradient that anybody's code stands for."""
        return self._codec.decode(code, self.count)

    def put_back(self, code: Array) -> None:
        """No update was made with this code, the last of ours: send it again with the next."""
        if self._feedback:
            self._left += self.unpack(code)
        if self._momentum:
            self._velocity += self._ended
