"""Runs: folder, checkpoints, metrics, evaluation, videos and plots."""
