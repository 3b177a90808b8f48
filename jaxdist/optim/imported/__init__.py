"""What is asked of optimizers that are not part of jaxdist."""
