"""The replication of ranges of parameters: copies on other servers, which take over."""
