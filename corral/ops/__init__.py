"""Pure functions without state, each tested against a literal NumPy implementation."""
