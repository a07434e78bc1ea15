"""All of it in order: pull, plan, preflight, serve, verify, bench, one report.

``pipeline.run`` is the order; ``objective.py`` says what must hold, ``loads.py`` what is measured,
``predicted.py`` what was expected, ``served.py`` holds the server, ``summary.py`` the report.
"""
