"""Files: formats, atomic writing, archives, records and locks."""
