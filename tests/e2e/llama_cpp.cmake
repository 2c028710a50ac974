# Included by CMake when pip compiles llama.cpp for the tests: its utilities for the command line take longer to compile
# than the library, and the Python server uses none of them.
set(LLAMA_BUILD_COMMON OFF)
