"""One publication over several connections: `lanes` gives each a part of its layers at a time.

Stands on `retrieval`, of which each part is one, and below `consumer`. It knows sessions, and no
way to open one.
"""
