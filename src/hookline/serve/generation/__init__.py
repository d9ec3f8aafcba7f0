"""Many requests through one model: rows, their cache, the forwards they share, and what each gets back."""
