"""What a run would be and cost, before it starts."""
