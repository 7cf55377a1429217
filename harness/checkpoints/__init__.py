"""A step on disk, whole or in shards: written, found again, restored, converted, removed."""
