"""Learning claims of Corral, tested with several seeds."""
