"""`corral serve`: an environment served over the link, for learners here or elsewhere."""
