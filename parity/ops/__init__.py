"""Operations: what a kernel computes, one folder each, found by registration."""
