"""Configuration: YAML with includes and overrides becomes one validated, frozen, typed tree."""
