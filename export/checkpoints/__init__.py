"""What a checkpoint says, and whether two of them speak of the same tokens."""
