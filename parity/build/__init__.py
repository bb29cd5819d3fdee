"""How kernels are compiled: the compile gate, and the store's CUDA source on a CPU."""
