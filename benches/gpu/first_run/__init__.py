"""The first run on a GPU that is available for minutes: correctness, then figures."""
