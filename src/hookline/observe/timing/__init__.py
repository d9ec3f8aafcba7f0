"""Where the time goes: `profile` and what it is made of."""
