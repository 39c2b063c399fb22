"""Exported states of simulators, kept by name: in memory, in files, or in a server that many share."""
