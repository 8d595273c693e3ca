"""The hot path: propose, verify, keep; knows no particular drafter and no particular task."""
