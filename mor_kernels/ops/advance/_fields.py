"""Rows of the table of lanes, in their order, before the tokens that end a request."""

FIELDS = ("recursion", "feed", "row", "slot", "line", "place", "position", "end")
NOTHING = -2  # in place of a token, where none came out
