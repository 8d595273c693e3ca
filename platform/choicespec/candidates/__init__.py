"""The finite sets: continuations found by suffix matching, ranked without looking at the model."""
