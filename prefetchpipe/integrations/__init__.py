"""One module for each framework, imported by its users only: ``import prefetchpipe`` imports none of them."""
