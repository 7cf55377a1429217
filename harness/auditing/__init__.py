"""Which tokens each step saw: batches made again, compared with a run's records, counted and shown."""
