"""Methods evaluated on recorded outputs and measured costs, without the target."""
