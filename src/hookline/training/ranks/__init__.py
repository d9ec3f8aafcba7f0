"""Train one experiment with several processes: who gets which data, and how their metrics become one record.

`hookline run` and the loops call it; it stands on ``hookline.distributed``.
"""
