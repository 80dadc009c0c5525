"""Steering of Ethernet frames: headers (parse.py), flow table lookups (lookups.py, steer.py), RSS (rss.py)."""
