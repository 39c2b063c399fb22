"""Shared by all benchmarks: interleaved rounds, reports, charts, facts of the machine."""
