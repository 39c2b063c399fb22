"""Networks: what sees observations, what remembers, and what decides."""
