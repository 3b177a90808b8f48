"""The parameter server of Ray, which runs in a Python that has ray."""
