"""How gradients and weights leave a learner."""
