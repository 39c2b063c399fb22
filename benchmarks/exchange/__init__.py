"""Seconds per update of learners that exchange gradients or weights over slow links."""
