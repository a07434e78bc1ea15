"""The engine without torch: requests, scheduler, page pool and prefix caches.

Everything here runs the same on the real executor and on a cost model under a virtual clock.
Read ``scheduler.py`` first; ``request.py`` and ``step.py`` are its nouns, ``pages.py``,
``prefix.py`` and ``segments.py`` its memory.
"""
