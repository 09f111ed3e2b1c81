"""Other engines with the block manager inside."""
