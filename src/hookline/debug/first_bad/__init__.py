"""Find the first bad operation, rank or layer of a step, check that a step repeats, record the last steps."""
