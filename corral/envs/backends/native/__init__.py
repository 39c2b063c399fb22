"""Environments that step many at once in C++: ALE's vector environment and EnvPool."""
