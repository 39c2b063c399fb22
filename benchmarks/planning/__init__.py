"""What planning adds to a half-trained policy, and planners that do not learn."""
