"""A request from text to text: prompts, tokens and outputs; below the scheduler."""
