"""What the process and the Ray backend share: a VecEnv whose environments live in workers."""
