"""The comparison of randomly drawn plans with a single device."""
