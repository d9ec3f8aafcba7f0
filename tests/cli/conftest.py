"""Tests of the command line: each in an empty folder, with the process as it was afterwards."""

from helpers_cli import alone

__all__ = ["alone"]
