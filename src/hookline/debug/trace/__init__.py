"""Write what flows through a model as fingerprints and tensors, and read it back."""
