"""How noise is found."""
