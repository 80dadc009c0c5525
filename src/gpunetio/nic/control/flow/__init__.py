"""Flow tables: their groups, entries, counters, and how rules become lookups of the engine."""
