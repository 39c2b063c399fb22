"""The learner's end of the link: sessions with simulators, and states inside them."""
