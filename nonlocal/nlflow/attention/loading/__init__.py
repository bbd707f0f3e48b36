"""Models from a folder or a hub name, and their inputs. Safetensors only."""
