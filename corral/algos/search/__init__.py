"""Algorithms that learn from tree search."""
