"""Environments in worker processes, several in each; observations and actions in shared memory."""
