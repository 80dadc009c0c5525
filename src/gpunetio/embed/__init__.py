"""Libraries in C that foreign programs load: how they are compiled, and how they join Python or start it.

    building    a C file becomes a shared object, once for this machine
    python      where this Python is, for a program that has none
    python.h    what the C files include: it runs a statement in the program's Python, or in one that it starts
"""
