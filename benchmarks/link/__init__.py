"""Rows per second of external simulators, beside other ways to connect them."""
