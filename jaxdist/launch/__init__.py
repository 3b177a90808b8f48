"""Launches of a job on a cluster, by an engine such as Slurm, Kubernetes or Ray."""
