"""Steps per second of training, and the time to learn CartPole, beside other libraries."""
