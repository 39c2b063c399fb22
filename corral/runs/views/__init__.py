"""Looking at runs: curves, tables, videos."""
