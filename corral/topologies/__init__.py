"""Wiring: which parts act, learn and store, and how they are connected."""
