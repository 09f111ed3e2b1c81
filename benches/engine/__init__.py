"""The engine's benchmarks: its overhead, its attention on the CPU, and end to end."""
