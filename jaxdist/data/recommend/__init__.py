"""Ratings and clicks: ids of categorical fields, dense features and a target per example."""
