"""The page of a run: records and facts in, one HTML file out."""
