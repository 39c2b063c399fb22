"""Simulations per second of tree search on Connect Four, compared with other libraries."""
