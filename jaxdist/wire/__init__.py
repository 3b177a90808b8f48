"""The transport of messages between workers and servers, over gRPC or within a process."""

import os

# By default gRPC prints a line to stderr for each connection that a peer ends, which is how every
# session ends. gRPC reads the variable when it is first used, so the variable is set before.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
