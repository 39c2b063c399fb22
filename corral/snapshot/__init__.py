"""The state of environments: save it, load it, step from it."""
