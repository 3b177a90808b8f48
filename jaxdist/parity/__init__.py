"""The comparison of training with any plan and training on a single device."""
