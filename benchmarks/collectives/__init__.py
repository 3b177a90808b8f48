"""Collectives: traffic, time, and beside gloo and torch."""
