"""`corral serve`: an environment put on the link, for learners here or elsewhere."""
