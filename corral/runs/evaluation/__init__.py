"""Evaluations: of a policy, and of a run while it trains."""
