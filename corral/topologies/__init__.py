"""Topologies: which processes act, learn and store data, and how they are connected."""
