"""Change what flows through a model, for as long as a block lasts (`hookline.patch`)."""
