"""Rules for single tensors, applied to each layer of parameters that are stacked."""
