"""Ratings and clicks: examples with ids of categorical fields, dense features and a target."""
