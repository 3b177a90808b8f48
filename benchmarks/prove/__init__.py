"""How many planted faults `jaxdist prove` finds, and how many right plans it calls wrong."""
