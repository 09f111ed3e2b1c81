"""Several engines as one: replicas on Ray Serve behind a router that knows what each has cached."""
