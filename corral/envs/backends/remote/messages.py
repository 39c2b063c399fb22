"""Messages between a VecEnv and its workers, for any transport."""

ROWS, RESET, STEP, CLOSE, RECORD, SAVE, LOAD = range(7)  # to a worker
SPEC, READY, FAULT, FAILED, SAVED, LOADED, ALIVE = range(10, 17)  # from a worker
