"""The base of all other packages: types, spaces, seeds, errors, encoding. No torch, no processes, no sockets."""
