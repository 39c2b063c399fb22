"""Where a role runs: a thread, a child process or a Ray actor, started, watched and stopped."""
