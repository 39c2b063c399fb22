"""Environments in Ray actors."""
