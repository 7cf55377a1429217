"""The loop: steps, evaluations, what is said of them, and what is done where numbers go wrong."""
