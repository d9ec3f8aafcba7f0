"""Save a run as it goes, and resume it bit for bit."""
