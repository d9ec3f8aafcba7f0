"""WHO: what hooks are made of, and what makes them."""
