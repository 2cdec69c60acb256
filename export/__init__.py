"""How a checkpoint becomes a bundle. Nothing here is imported where a bundle is used."""
