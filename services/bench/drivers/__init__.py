"""What runs inside each measured process; serve.py and the peers' drivers need no kvrelay there."""
