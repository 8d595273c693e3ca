"""Fitting neural drafters to what the target said."""
