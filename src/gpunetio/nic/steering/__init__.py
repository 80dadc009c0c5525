"""Steering of Ethernet frames: headers (parse.py), the entries that decide about a frame (steer.py), RSS (rss.py)."""
