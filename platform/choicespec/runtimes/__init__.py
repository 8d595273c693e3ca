"""Where a pair runs."""
