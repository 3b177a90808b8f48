"""The bench `jaxdist bench param-server`: the wire, bytes into servers, and slow workers."""
