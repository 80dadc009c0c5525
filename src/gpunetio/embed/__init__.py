"""Build C libraries that foreign programs load, and that join the program's Python or start one.

    building    compiles a C file to a shared object, once per machine
    python      describes this Python to programs that must start it
    python.h    for the C files: runs a statement in the program's Python, or in one that it starts
"""
