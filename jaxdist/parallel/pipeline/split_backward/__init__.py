"""A backward pass in two halves: B for the gradient of the input, W for the weights' gradients."""
