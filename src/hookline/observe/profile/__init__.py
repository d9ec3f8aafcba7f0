"""Measure where the time of a step goes (`hookline.profile`)."""
