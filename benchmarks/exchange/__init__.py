"""Seconds per update of learners that share gradients or weights, over slow links."""
