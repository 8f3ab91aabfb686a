"""What a run is: the schema of every key, and the recipes we ship."""
