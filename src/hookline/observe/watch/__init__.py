"""Keep streaming statistics of a model: one row of numbers per place, reduced where the tensors are."""
