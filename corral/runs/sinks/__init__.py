"""Where a run's metrics go."""
