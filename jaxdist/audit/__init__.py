"""The audit, which checks that the settings of a config change the compiled program."""
