"""A run as an object: its folder, checkpoints, metrics, evaluation, videos and plots."""
