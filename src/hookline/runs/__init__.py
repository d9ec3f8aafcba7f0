"""A run as one value: read it, look up what it names, build it, train it, find its folder."""
