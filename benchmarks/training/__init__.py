"""Steps per second of training, and the time to learn CartPole, compared with other libraries."""
