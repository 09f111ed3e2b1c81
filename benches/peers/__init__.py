"""This block manager against others, in one process and one run: `python -m benches.peers`."""
