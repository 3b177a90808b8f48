"""Update rules for single tensors, applied to each layer of stacked parameters."""
