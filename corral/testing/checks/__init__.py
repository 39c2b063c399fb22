"""What `corral check-env` tries."""
