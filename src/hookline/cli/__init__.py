"""The command line: ``hookline run | hooks | find | check | report | replay | new``."""
