"""The best configuration behind an OpenAI-compatible endpoint; the only room that imports Ray Serve and FastAPI."""
