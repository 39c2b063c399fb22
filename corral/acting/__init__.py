"""Acting: policies, the sampling loop, and the trajectories it yields."""
