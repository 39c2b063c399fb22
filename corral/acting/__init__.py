"""Acting: policies, the environment loop, and what it yields."""
