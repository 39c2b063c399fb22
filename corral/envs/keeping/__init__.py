"""States of Python environments: kept, and brought back into an environment; one file for each way to do that."""
