"""Several hosts under one run: a rendezvous, who keeps its registry, what each host does."""
