"""The formulas: pure functions without state, each with a literal NumPy twin in the tests."""
