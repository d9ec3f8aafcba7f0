"""Compare the log-probs of a trainer and an engine for the same tokens, and say where they part; see `parity`."""
