"""Courses: the orders of operators that forward calls are known to take, and what C++ sees while one is followed.

``known`` holds them and chooses; ``runs`` is one call that learns or follows a course; ``deviation`` names what a call
that left all of them did; ``edges`` and ``values`` are what is measured besides, at consumers and of the values.
"""

__all__: list[str] = []
