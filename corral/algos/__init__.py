"""Algorithms, one file each: settings, networks used, policy, loss, and the data they need."""
