"""Parity: every plan compared with training on a single device."""
