"""Compute streaming statistics: one row of numbers for each site, reduced where the tensors are."""
