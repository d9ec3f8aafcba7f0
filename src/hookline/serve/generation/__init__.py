"""Generate for many requests through one model: rows, their cache, the forwards they share."""
