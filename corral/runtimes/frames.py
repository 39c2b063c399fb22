"""Kinds of frames between a runtime and its roles."""

# to a role
CALL, TELL, CLOSE = range(3)
# from a role
ANSWER, ALIVE = range(10, 12)
