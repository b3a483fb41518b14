"""Courses: the orders of operators that forward calls are known to take, and what C++ sees while one is followed.

``known`` holds them and chooses; ``runs`` is one call that learns or follows a course; ``deviation`` names what a call
that left all of them did; ``edges`` and ``values`` are what is measured besides, at consumers and of the values.

``ways`` are the same for calls under rewrite rules, which know functions and modules; ``rest`` takes a call over that
left them, and ``beside`` measures it.
"""

__all__: list[str] = []
