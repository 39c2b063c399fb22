"""Algorithms, one file each: settings, network, policy, loss, and the data they need."""
