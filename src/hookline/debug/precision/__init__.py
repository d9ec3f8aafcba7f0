"""Check the numbers at every module and function: `PrecisionChecker`."""
