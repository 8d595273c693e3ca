"""choicespec: the fastest way to decode a language model with exactly the same output."""

__version__ = "0.1.0"
