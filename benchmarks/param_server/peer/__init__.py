"""The other parameter server, in a Python that has ray."""
