"""The division of a backward pass into two halves: gradient of the input, gradients of weights."""
