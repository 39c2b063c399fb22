"""Contract suites: subclass one and provide your implementation."""
