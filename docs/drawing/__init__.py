"""What docs/draw_analyses.py is made of: runs, tables, and the pictures by kind of hook."""
