"""Measuring Corral beside its peers: interleaved rounds, their statistics, tables, charts and verdicts.

`rounds` knows nothing of environments, so that any benchmark of Corral can use it; `cases` says what
`corral bench sampling` compares.
"""
