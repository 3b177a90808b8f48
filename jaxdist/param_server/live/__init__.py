"""Servers and workers that run: threads, clocks and arrays around the protocol."""
