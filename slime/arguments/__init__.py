"""Command-line flags: declared as tables (`families/`), parsed (`parser`), checked and completed (`validation/`).

Nothing here imports torch, ray or transformers: a wrong configuration is reported before anything heavy is loaded.
"""
