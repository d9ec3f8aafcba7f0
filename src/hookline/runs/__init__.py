"""A run as data: read its file, look up what it names, find its folder."""
