"""Environment steps per second of every backend, beside other libraries."""
