"""Stores between acting and learning: data is used once or replayed, behind a rate limiter."""
