"""PNG charts, from what was measured; matplotlib is imported when one is drawn."""
