"""Corral compared with other libraries: `python -m benchmarks NAME` from the repository root. Not in the wheel."""
