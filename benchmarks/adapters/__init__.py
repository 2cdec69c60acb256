"""How `peers.py` talks to each program it measures: one file a program, run in that program's own environment."""
