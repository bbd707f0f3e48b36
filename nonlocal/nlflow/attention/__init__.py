"""Layers of transformers as steps of the flow: terms against over-smoothing, and what trained layers do."""

import lazy_loader

# The list of names and where they live is the stub beside this file, which type checkers read as well.
_load, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

del lazy_loader


def __getattr__(name: str) -> object:
    """Load a public name, or say how torch is installed."""
    try:
        return _load(name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        from nlflow.errors import not_installed

        raise not_installed(__name__, "torch", "attention") from error
