"""What looking ahead adds to a half-trained policy, and to none."""
