"""Show for every parameter that a plan computes what one device would."""
