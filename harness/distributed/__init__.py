"""Several processes that train one model: how they meet, agree, share the work and fail together."""
