"""How transformers' own modelling code becomes a graph, and what it keeps of a text."""
