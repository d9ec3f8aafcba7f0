"""Streaming statistics: one row of numbers per site, reduced where the tensors are."""
