"""Who proposes tokens: draft models, heads, and what needs no model. Whether it pays is not known here."""
