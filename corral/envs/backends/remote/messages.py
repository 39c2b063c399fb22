"""Messages between a VecEnv and its workers, for any transport."""

ROWS, RESET, STEP, CLOSE, RECORD, SAVE, LOAD, APPLY, KEEP_INFOS = range(9)  # to a worker
SPEC, READY, FAULT, FAILED, SAVED, LOADED, ALIVE, APPLIED, INFOS = range(10, 19)  # from a worker
