"""C++ kernels for x86-64 CPUs. Optional: built by setup.py where there is a compiler, see docs/cpu-kernels.md."""
