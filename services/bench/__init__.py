"""`kvrelay bench`: measures the engine on this machine, beside others in the same run."""
