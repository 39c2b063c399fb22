"""The `corral` command: one file per command, each a dataclass of its options with a `run`."""
