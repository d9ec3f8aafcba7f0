"""Call hooks on modules: one table of hooks for each module, at most four torch hooks."""
