"""Literal versions of published algorithms, to compare fast code with."""
