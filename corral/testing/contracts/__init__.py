"""Contract suites: subclass one and give it your implementation."""
