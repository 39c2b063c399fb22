"""Stepping a group of environments: autoreset, row buffers, faults, and restoring episodes."""
