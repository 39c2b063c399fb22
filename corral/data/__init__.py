"""What carries data from acting to learning: used once or replayed, always behind a rate limiter."""
