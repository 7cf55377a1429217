"""What a run may go on from, and what must not have changed meanwhile."""
