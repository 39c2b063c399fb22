"""Environment steps per second of every backend, compared with other libraries."""
