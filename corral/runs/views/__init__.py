"""Views of runs: curves, tables, videos."""
