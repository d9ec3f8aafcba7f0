"""Run training: the loops, and what an experiment supplies to them."""
