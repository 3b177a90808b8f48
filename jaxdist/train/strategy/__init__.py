"""The strategies, which divide a run into steps and processes: a contract, and implementations."""
