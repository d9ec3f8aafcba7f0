"""Find the first bad operation of a step, check that a step repeats, record the last steps, switch hooks on."""
