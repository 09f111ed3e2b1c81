"""Bodies of requests and responses, and the effect of each field."""
