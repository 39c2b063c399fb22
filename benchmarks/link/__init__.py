"""Rows per second of external simulators, compared with other ways to connect them."""
