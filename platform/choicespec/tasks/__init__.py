"""Where the prompts come from."""
