"""Corral beside other libraries: `python -m benchmarks NAME`, from the root of the repository; not in the wheel."""
