"""The combinations of settings that are refused, and the settings without effect."""
