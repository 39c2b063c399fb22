"""Planning on saved and restored states of the real environment."""
