"""Where a role lives: a thread, a child process or a Ray actor, started, watched and ended."""
