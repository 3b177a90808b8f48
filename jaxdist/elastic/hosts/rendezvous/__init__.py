"""Rendezvous of hosts: in a directory, or on a Redis server."""
