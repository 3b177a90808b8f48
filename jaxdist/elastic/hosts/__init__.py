"""A run on several hosts: their rendezvous, leader election, membership, plans and snapshots."""
