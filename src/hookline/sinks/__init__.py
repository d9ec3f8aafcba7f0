"""OUT: where metrics go, one destination per file."""
