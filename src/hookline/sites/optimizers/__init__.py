"""Put hooks on an optimizer's step and state."""
