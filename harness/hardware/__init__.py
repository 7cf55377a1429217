"""The device a run computes on: chosen, fed, and what it could do at most."""
