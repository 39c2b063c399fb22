"""The checks of `corral check-env`."""
