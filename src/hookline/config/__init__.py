"""Files that say what to run: YAML, TOML, JSON, checked, with the line of each mistake."""
