"""Flow tables with their groups, entries and counters, and the hash tables in which the engine looks rules up."""
