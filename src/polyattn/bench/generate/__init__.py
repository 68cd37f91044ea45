"""Text generation of transformers, stock beside polyattn: ``polyattn bench generate``."""

__all__: list[str] = []
