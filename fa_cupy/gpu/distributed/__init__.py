"""Arrays on their way between GPUs, and sums of what ranks have found."""
