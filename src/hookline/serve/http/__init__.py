"""The engine over HTTP: what is taken, what is refused, what is sent."""
