"""The points of a run, schedules, phases, and the context that hooks are shown."""
