"""The page of `jaxdist report --html`: a self-contained HTML file about one or several runs."""
