"""Sweeps: which directory a job has, who works on it, how far all of them are, and what they say together."""
