"""Serve a model: hooks described as data at its start, and on the running model over HTTP."""
