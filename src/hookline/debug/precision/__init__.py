"""Check the numbers at every module and function: `PrecisionChecker`, and the comparison of the folders it writes."""
