"""A model that is served: hooks from data at its start, and on the running model over HTTP."""
