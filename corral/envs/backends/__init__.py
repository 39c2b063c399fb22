"""Where environments run, one folder or file per way; all pass one contract suite."""
