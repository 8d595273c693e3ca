"""MLflow: runs and champions."""
