"""Training, from setting up to clearing away."""
