"""Monte Carlo tree search: many trees at once, as arrays."""
