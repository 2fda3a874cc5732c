"""Page-locked host memory: blocks of exact size, and the ring of slots made of them."""
