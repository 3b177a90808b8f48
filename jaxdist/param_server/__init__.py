"""The parameter server's pure core: what is placed where, who may read, what is applied when.

No sockets, no processes, no clock of its own: servers, workers and the simulator give it messages
and the time, and do what it says.
"""
