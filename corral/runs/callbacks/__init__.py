"""Callbacks of a run: the contract, early stopping, and those that every run has."""
