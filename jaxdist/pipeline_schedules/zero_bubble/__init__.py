"""The zero-bubble schedules, whose WEIGHT tasks fill the gaps between other tasks."""
