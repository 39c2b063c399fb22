"""Learning: the learner, its losses in NumPy, flat weights, and exchanges between learners."""
