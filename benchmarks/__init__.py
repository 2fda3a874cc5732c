"""Measurements of prefetchpipe next to other ways to bring batches to the GPU: ``python -m benchmarks --help``."""
