"""Simulations per second of tree search on Connect Four, beside other libraries."""
