"""Hooks inside code that ``torch.compile`` has made."""
