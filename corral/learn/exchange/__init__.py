"""Exchanges of gradients and weights between learners."""
