"""The protocol of workers and one range: pure state machines that deliver messages in order."""
