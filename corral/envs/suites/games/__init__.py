"""Board games as arrays of words, many positions at once."""
