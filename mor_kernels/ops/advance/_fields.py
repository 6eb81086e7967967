"""Rows of the table of lanes, in their order, before whatever else there is of a lane; idle: -1 up to `waits`."""

FIELDS = ("recursion", "feed", "row", "slot", "line", "place", "waits", "position", "end")
NOTHING = -2  # in place of a token, where none came out
