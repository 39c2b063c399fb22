"""What Corral claims to learn, trained over several seeds."""
