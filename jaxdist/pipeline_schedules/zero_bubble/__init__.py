"""Zero-bubble schedules: weight gradients fill the gaps between the other tasks."""
