"""The transport of messages between workers and servers, over gRPC or within a process."""
