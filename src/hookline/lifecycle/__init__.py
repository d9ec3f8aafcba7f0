"""WHEN: the moments of a run, and which of them a hook is due at."""
