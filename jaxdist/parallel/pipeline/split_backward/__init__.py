"""The two halves of a backward pass: B, for the inputs, and W, for the weights."""
