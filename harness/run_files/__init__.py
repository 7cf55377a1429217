"""What a run leaves in its directory beside checkpoints and metrics, and how that is read back."""
