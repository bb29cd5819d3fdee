"""Pages: layouts, placement, pools and poison, drawn values."""
