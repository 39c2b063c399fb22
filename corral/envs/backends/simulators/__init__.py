"""External simulators, over the link."""
