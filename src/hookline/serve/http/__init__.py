"""Serve the engine over HTTP: requests, refusals, answers."""
