"""What is asked: frozen specifications that import neither torch nor Ray."""
