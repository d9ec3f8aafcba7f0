"""Say what is on a model: `doctor` (hooks, and sites where none would fire), `graph` (the graph of a loss)."""
