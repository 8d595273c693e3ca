"""The learned ranking of a candidate set: reads the hidden state, the tokens, and what the prior knows."""
