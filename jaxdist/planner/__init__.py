"""The planner: it searches plans for training a model on a pod, and confirms them by compiling."""
