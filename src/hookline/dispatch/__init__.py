"""JOIN: which hook runs at which moment, in which order, and where its metrics go."""
