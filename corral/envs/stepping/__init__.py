"""Stepping a group of environments: autoreset, memory, faults, and what brings an episode back."""
