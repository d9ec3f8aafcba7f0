"""Compare two runs: align, measure, judge, and show."""
