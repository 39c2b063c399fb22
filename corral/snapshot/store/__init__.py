"""Exported states by name: in memory, in files, or on a server."""
