"""Backends: where environments run, one file or folder each; all pass the same contract suite."""
