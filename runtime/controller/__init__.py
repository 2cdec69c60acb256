"""Who proposes in a round, how much, and whether it pays on this device: asked before a round, taught after it."""
