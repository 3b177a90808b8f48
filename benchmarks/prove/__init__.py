"""The bench `jaxdist bench prove`: planted faults that are found, and false alarms."""
