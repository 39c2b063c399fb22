"""How one environment's state is saved and loaded, one file per method."""
