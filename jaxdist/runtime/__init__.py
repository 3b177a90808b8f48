"""The platform of a program: environment, hardware, topologies, compilation cache, processes."""
