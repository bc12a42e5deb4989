"""The session log: vocabulary, codec, writer, projection, repair, reading, verification, export.

``events``, ``surface``, ``projection`` and ``repair`` are pure: no files, no clock, no ids.
"""
