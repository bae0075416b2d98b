"""What a call means: arrays, checks, and the canonical problems that every backend solves."""
