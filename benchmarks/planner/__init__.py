"""What `jaxdist plan` predicts, held against compiled programs and published runs."""
