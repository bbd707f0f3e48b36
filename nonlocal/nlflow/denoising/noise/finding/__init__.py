"""How noise is found: its strength, finders of single kinds, rules, and the verdict."""
