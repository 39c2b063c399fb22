"""Families of environments with their standard preprocessing."""
