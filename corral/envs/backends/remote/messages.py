"""Messages between a VecEnv and its workers, whatever carries them."""

from __future__ import annotations

# to a worker
ROWS, RESET, STEP, CLOSE, RECORD, SAVE, LOAD = range(7)
# from a worker
SPEC, READY, FAULT, FAILED, SAVED, LOADED, ALIVE = range(10, 17)
