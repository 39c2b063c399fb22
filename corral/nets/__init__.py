"""Networks: encoders, recurrent cores, policies and values."""
