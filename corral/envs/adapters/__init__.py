"""Corral's environments in the interfaces of other libraries, and old ones in the present interface."""
