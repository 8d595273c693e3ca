"""The only room that imports Ray."""
