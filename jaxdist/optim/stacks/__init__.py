"""The application of update rules for single tensors to each layer of stacked parameters."""
