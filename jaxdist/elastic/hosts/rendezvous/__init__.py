"""The rendezvous at which hosts exchange values: a directory, a Redis server, or etcd."""
