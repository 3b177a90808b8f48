"""The kinds of feedback, each a `jaxdist.compression.feedback.contract.Feedback`."""
