"""What every benchmark uses: interleaved rounds, reports, charts, facts of the machine."""
