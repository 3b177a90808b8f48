"""Types: what each value of a step is along each mesh axis, read from the program alone."""
