"""Checkpoints: written, read, pruned, and as the start of another run."""
