"""Many replicas: what routing by cached contents gains, and what it costs."""
