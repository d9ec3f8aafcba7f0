"""What a hook yields: times, and, as they come, statistics, captures and patches."""
