"""Where the parts of a run live: threads of this process, processes of this machine, or Ray actors of a cluster."""
