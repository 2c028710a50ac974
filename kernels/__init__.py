"""Chunked ops for prefill. Kept free of imports: see docs/kernels.md on the name it shares with a hub package."""
