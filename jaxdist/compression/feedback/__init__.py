"""What a sender keeps of what its messages left out, each a `...feedback.contract.Feedback`."""
